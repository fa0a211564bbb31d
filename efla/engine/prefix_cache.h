// A cache of model states after the beginnings of prompts. The states are immutable, and each follows a multiple of
// nn::kCutTokens tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "efla/engine/stored.h"

namespace efla::engine {

// Returns the names of a prompt's beginnings, of which the i-th has the first (i + 1) · nn::kCutTokens ids. A name is a
// SHA-256 of all ids of the beginning and of the client, because Usage would tell a client what others have asked. Only
// beginnings that leave at least one id are named.
std::vector<std::string> names_of_beginnings(std::span<const std::int32_t> prompt, const std::string& client);

// The cached states. Not for several threads at once.
class PrefixCache {
 public:
  // bytes: of all states together; 0: it never stores a state.
  explicit PrefixCache(std::size_t bytes) : budget_(bytes) {}

  struct Plan {
    std::optional<nn::TextState> state;         // of the longest beginning that is stored
    std::size_t known = 0;                      // number of beginnings that the state covers
    std::vector<std::size_t> store_after = {};  // beginnings, counted as `known`, after which put should be called
  };
  // Plans a prompt. Three kinds of states are worth their memory: at the end of a prompt, because a longer prompt may
  // follow; where a prompt departs from an earlier one, because others may depart there; after the beginnings in
  // `wanted`.
  Plan plan(const std::vector<std::string>& names, std::vector<std::size_t> wanted = {});

  // Stores the state after a beginning. To make room, drops the states that save the least: the product of tokens and
  // hits, divided by the number of plans since the last hit. A page counts once, however many states have it.
  void put(const std::string& name, std::size_t tokens, const nn::TextState& state);

  std::size_t bytes() const { return bytes_->memory; }
  std::int64_t entries() const { return static_cast<std::int64_t>(entries_.size()); }

 private:
  struct Entry {
    std::unique_ptr<StoredState> state;
    std::size_t tokens = 0;
    std::uint64_t hits = 0, last = 0;
  };
  void remember(std::size_t hash);

  std::size_t budget_;
  const std::shared_ptr<StoredBytes> bytes_ = std::make_shared<StoredBytes>();
  const std::shared_ptr<StoredPages> pages_ = std::make_shared<StoredPages>();
  std::uint64_t now_ = 0;
  std::map<std::string, Entry> entries_;
  // Hashes of the beginnings of earlier prompts, with or without a state: two beginnings with the same hash only make
  // the cache store a state in vain.
  std::unordered_set<std::size_t> seen_;
  std::deque<std::size_t> order_;  // the hashes in seen_, the oldest first
};

}  // namespace efla::engine
