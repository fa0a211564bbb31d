// Byte-pair encoding (Sennrich et al., "Neural machine translation of rare words with subword units", 2016): of all
// neighbours that form a token, the pair that comes first in the tokenizer's order is joined, the leftmost of equals
// first, until no pair is left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <queue>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace efla::data {

// The tokens of a word while they are joined. The object can be reused for the next word, and keeps its memory.
class BytePairs {
 public:
  struct Symbol {
    std::int32_t previous, next;  // −1: none
    std::int32_t id;              // −1: no token
    std::uint32_t begin, size;    // in the word, in bytes; size 0: joined to the symbol before it
  };
  // The token that two neighbours form, and its place in the order of joins: the smallest is joined first.
  struct Joined {
    std::int32_t id;  // −1: they form none
    double order;
  };

  void clear() { symbols_.clear(); }
  // Appends a symbol to the word.
  void push(std::int32_t id, std::size_t size) {
    const auto i = static_cast<std::int32_t>(symbols_.size());
    const std::uint32_t begin = symbols_.empty() ? 0 : symbols_.back().begin + symbols_.back().size;
    if (i > 0) symbols_.back().next = i;
    symbols_.push_back({i - 1, -1, id, begin, static_cast<std::uint32_t>(size)});
  }

  // Joins neighbours as `find(left, right)`, which returns a Joined, says. Then calls `token(symbol)` for every symbol
  // left.
  template <class Find, class Token>
  void join(const Find& find, const Token& token) {
    for (std::int32_t i = 1; std::cmp_less(i, symbols_.size()); ++i) push_join(i - 1, i, find);
    while (!joins_.empty()) {
      const Join join = joins_.top();
      joins_.pop();
      Symbol& left = at(join.left);
      Symbol& right = at(join.right);
      // Another join may have consumed one of the two.
      if (left.size == 0 || right.size == 0 || left.size + right.size != join.size) continue;
      left.size = join.size;
      left.id = join.id;
      left.next = right.next;
      if (right.next >= 0) at(right.next).previous = join.left;
      right.size = 0;
      push_join(left.previous, join.left, find);
      push_join(join.left, left.next, find);
    }
    for (std::int32_t i = symbols_.empty() ? -1 : 0; i >= 0; i = at(i).next) token(std::as_const(at(i)));
  }

 private:
  struct Join {
    double order;
    std::int32_t left, right, id;
    std::uint32_t size;
    bool operator<(const Join& other) const {  // of a queue whose top is the greatest
      return order > other.order || (order == other.order && left > other.left);
    }
  };

  Symbol& at(std::int32_t i) { return symbols_[static_cast<std::size_t>(i)]; }

  template <class Find>
  void push_join(std::int32_t left, std::int32_t right, const Find& find) {
    if (left < 0 || right < 0) return;
    const Joined joined = find(std::as_const(at(left)), std::as_const(at(right)));
    if (joined.id >= 0) joins_.push({joined.order, left, right, joined.id, at(left).size + at(right).size});
  }

  std::vector<Symbol> symbols_;
  std::priority_queue<Join> joins_;
};

// Encodes the words of a text. Copies the ids of a word that has occurred before. The text must stay in memory, and
// every call must append to the same `out`.
class WordIds {
 public:
  // Appends the ids of a word, which `encode(word, out)` computes.
  template <class Encode>
  void append(std::string_view word, std::vector<std::int32_t>& out, const Encode& encode) {
    if (word.size() > kLongest) return encode(word, out);
    const std::size_t first = out.size();
    const auto [place, is_new] = seen_.try_emplace(word, first, 0);
    auto& [from, count] = place->second;
    if (is_new) {
      encode(word, out);
      count = out.size() - first;
    } else {
      for (std::size_t i = 0; i < count; ++i) out.push_back(out[from + i]);
    }
  }

 private:
  static constexpr std::size_t kLongest = 64;  // bytes of a word that is looked up

  std::unordered_map<std::string_view, std::pair<std::size_t, std::size_t>> seen_;  // place and number of ids in out
};

}  // namespace efla::data
