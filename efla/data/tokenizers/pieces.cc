#include "efla/data/tokenizers/pieces.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "efla/base/utf8.h"

namespace efla::data {

std::string with_marks(std::string_view text) {
  std::string marked;
  marked.reserve(text.size() + text.size() / 2);
  for (const char c : text) {
    if (c == ' ') {
      marked += kSpaceMark;
    } else {
      marked += c;
    }
  }
  return marked;
}

std::string with_spaces(std::string_view text) {
  std::string spaced;
  for (std::size_t at = 0; at < text.size();) {
    const bool space = text.substr(at).starts_with(kSpaceMark);
    spaced += space ? ' ' : text[at];
    at += space ? kSpaceMark.size() : 1;
  }
  return spaced;
}

std::size_t word_end(std::string_view text, std::size_t begin) {
  while (text.substr(begin).starts_with(kSpaceMark)) begin += kSpaceMark.size();
  return std::min(text.find(kSpaceMark, begin), text.size());
}

int byte_of(std::string_view piece) {
  if (piece.size() != 6 || !piece.starts_with("<0x") || !piece.ends_with('>')) return -1;
  std::uint8_t value = 0;
  const auto* digits = piece.data() + 3;
  return std::from_chars(digits, digits + 2, value, 16).ptr == digits + 2 ? value : -1;
}

std::size_t last_word_break(std::string_view text, const std::function<bool(char, char)>& allowed) {
  const auto is_space = [](std::string_view at) { return at.starts_with(' ') || at.starts_with(kSpaceMark); };
  for (auto i = text.rfind(' '); i != std::string_view::npos && i > 0; i = text.rfind(' ', i - 1)) {
    const auto before = text.substr(0, i), behind = text.substr(i + 1);
    // An incomplete character may still become a space.
    if (behind.empty() || utf8_character(behind) < 1 || is_space(behind)) continue;
    if (before.ends_with(' ') || before.ends_with(kSpaceMark)) continue;
    if (allowed(before.back(), behind.front())) return i;
  }
  return 0;
}

}  // namespace efla::data
