#include "efla/data/tokenizers/pieces.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "efla/base/utf8.h"

namespace efla::data {
namespace {

// Returns the bytes of two characters as a number.
std::uint64_t key_of(std::string_view left, std::string_view right) {
  std::uint64_t key = 0;
  for (const std::string_view character : {left, right}) {
    std::uint32_t bytes = 0;
    for (const char c : character) bytes = bytes << 8 | static_cast<std::uint8_t>(c);
    key = key << 32 | bytes;
  }
  return key;
}

}  // namespace

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

void JoinedCharacters::add_all(std::string_view text) {
  for (std::size_t at = utf8_last(text); at > 0;) {
    const auto begin = utf8_last(text.substr(0, at));
    pairs_.insert(key_of(text.substr(begin, at - begin), utf8_first(text.substr(at))));
    at = begin;
  }
}

std::size_t JoinedCharacters::last_break(std::string_view text, const Allowed& allowed) const {
  const auto marked = [](std::string_view character) { return character == " " ? kSpaceMark : character; };
  for (std::size_t at = utf8_last(text); at > 0;) {
    const auto begin = utf8_last(text.substr(0, at));
    const auto before = marked(text.substr(begin, at - begin)), behind = marked(utf8_first(text.substr(at)));
    // An incomplete character may become any.
    const bool whole = utf8_character(behind) > 0;
    if (whole && !pairs_.contains(key_of(before, behind)) && allowed(at, before, behind)) return at;
    at = begin;
  }
  return 0;
}

}  // namespace efla::data
