#include "efla/serve/grammar/expansion.h"

#include <algorithm>
#include <vector>

namespace efla::serve {
namespace {

constexpr std::int64_t kMost = 2 * kMostExpanded;

// Returns the larger bound of the repetition that begins a text, and removes the repetition; 1 where there is none.
std::int64_t take_bound(std::string_view& text) {
  if (!text.starts_with('{')) return 1;
  const auto end = text.find('}');
  if (end == std::string_view::npos || text.find_first_not_of("0123456789, ", 1) != end) return 1;
  std::int64_t largest = 1, number = 0;
  for (const char c : text.substr(0, end)) {
    number = c >= '0' && c <= '9' ? std::min(kMost, 10 * number + (c - '0')) : 0;
    largest = std::max(largest, number);
  }
  text.remove_prefix(end + 1);
  return largest;
}

// Removes the character, escape or class in brackets that begins a text.
void skip_one(std::string_view& text) {
  std::size_t size = 1;
  if (text.front() == '\\') {
    size = 2;
  } else if (text.front() == '[') {
    while (size < text.size() && text[size] != ']') size += text[size] == '\\' ? 2 : 1;
    ++size;
  }
  text.remove_prefix(std::min(size, text.size()));
}

}  // namespace

std::int64_t expanded_size(std::string_view expression) {
  std::vector<std::int64_t> open{0};  // sizes of the groups that are not closed
  const auto add = [&](std::int64_t size) {
    open.back() = std::min(kMost, open.back() + size * take_bound(expression));
  };
  while (!expression.empty()) {
    if (expression.front() == '(') {
      open.push_back(0);
      expression.remove_prefix(1);
    } else if (expression.front() == ')' && open.size() > 1) {
      const auto size = open.back();
      open.pop_back();
      expression.remove_prefix(1);
      add(size);
    } else {
      skip_one(expression);
      add(1);
    }
  }
  std::int64_t size = 0;
  for (const auto one : open) size = std::min(kMost, size + one);
  return size;
}

std::int64_t expanded_repeats(std::string_view grammar) {
  std::int64_t product = 1;
  while (!grammar.empty()) {
    if (grammar.front() == '{') product = std::min(kMost, product * std::max<std::int64_t>(1, take_bound(grammar)));
    if (!grammar.empty()) skip_one(grammar);
  }
  return product;
}

}  // namespace efla::serve
