// States after prompts that began alike: immutable, each after a multiple of nn::kCutTokens tokens from the beginning
// of a text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

namespace efla::serve {

using State = std::vector<float>;

// Returns the names of a prompt's beginnings: the i-th stands for the first (i + 1) · nn::kCutTokens ids, each name for
// all ids before it and for the client (SHA-256), because usage tells a client what the cache has. Only beginnings that
// leave at least one id are named.
std::vector<std::string> names_of_beginnings(std::span<const std::int32_t> prompt, const std::string& client);

// Not for several threads at once.
class PrefixCache {
 public:
  // bytes: of all states together; 0: it never stores a state.
  explicit PrefixCache(std::size_t bytes) : budget_(bytes) {}

  struct Plan {
    std::shared_ptr<const State> state;         // of the longest beginning that is stored, or null
    std::size_t known = 0;                      // beginnings that this state is after
    std::vector<std::size_t> store_after = {};  // beginnings, counted as `known`, after which put should be called
  };
  // Plans a prompt. States are worth their memory at the end of a prompt, because a longer one may follow, where a
  // prompt leaves an earlier one, because more may leave it there, and after the beginnings that `wanted` counts.
  Plan plan(const std::vector<std::string>& names, std::vector<std::size_t> wanted = {});

  // Stores the state after a beginning. Drops the states that save the least: the product of their tokens and their
  // hits, divided by the time since the last one.
  void put(const std::string& name, std::size_t tokens, std::shared_ptr<const State> state);

  std::size_t bytes() const { return bytes_; }
  std::int64_t entries() const { return static_cast<std::int64_t>(entries_.size()); }

 private:
  struct Entry {
    std::shared_ptr<const State> state;
    std::size_t tokens = 0;
    std::uint64_t hits = 0, last = 0;
  };
  void remember(std::size_t hash);

  std::size_t budget_, bytes_ = 0;
  std::uint64_t now_ = 0;
  std::map<std::string, Entry> entries_;
  // Hashes of the beginnings of earlier prompts, with or without a state: two with the same hash only make the cache
  // store a state that it need not.
  std::unordered_set<std::size_t> seen_;
  std::deque<std::size_t> order_;  // of seen_
};

}  // namespace efla::serve
