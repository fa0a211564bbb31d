#include "efla/base/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace efla {

namespace {

struct Start {
  int size;   // of the character that the first byte begins; 0: it begins none
  int found;  // bytes of it that the text has
};

Start start_of(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t first = byte(0);
  if (first < 0x80) return {1, 1};
  if (first < 0xC2 || first > 0xF4) return {0, 0};
  const int size = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // The range of the second byte excludes overlong forms, surrogates, and code points above U+10FFFF.
  std::uint8_t low = 0x80, high = 0xBF;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  int found = 1;
  for (; found < size && static_cast<std::size_t>(found) < text.size(); ++found) {
    const auto b = byte(static_cast<std::size_t>(found));
    if (b < low || b > high) break;
    low = 0x80, high = 0xBF;
  }
  return {size, found};
}

}  // namespace

int utf8_character(std::string_view text) {
  const auto [size, found] = start_of(text);
  if (found == size) return size;
  return static_cast<std::size_t>(found) == text.size() ? -1 : 0;
}

std::size_t utf8_maximal_part(std::string_view text) {
  return static_cast<std::size_t>(std::max(start_of(text).found, 1));
}

std::size_t utf8_prefix(std::string_view text) {
  constexpr std::uint64_t kHighBits = 0x8080808080808080;
  std::size_t at = 0;
  while (at < text.size()) {
    std::uint64_t eight = 0;
    if (text.size() - at >= sizeof(eight)) {
      std::memcpy(&eight, text.data() + at, sizeof(eight));
      if ((eight & kHighBits) == 0) {
        at += sizeof(eight);
        continue;
      }
    }
    const int size = utf8_character(text.substr(at));
    if (size <= 0) break;
    at += static_cast<std::size_t>(size);
  }
  return at;
}

std::string_view utf8_first(std::string_view text) {
  return text.substr(0, static_cast<std::size_t>(std::max(utf8_character(text), 1)));
}

std::size_t utf8_last(std::string_view text) {
  std::size_t at = text.size();
  while (at > 0 && (static_cast<std::uint8_t>(text[--at]) & 0xC0) == 0x80) {
  }
  return at;
}

}  // namespace efla
