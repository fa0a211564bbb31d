#include "efla/base/utf8.h"

#include <cstdint>
#include <cstring>

namespace efla {

int utf8_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const int size = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // The range of the second byte excludes overlong forms, surrogates, and code points above U+10FFFF.
  std::uint8_t low = 0x80, high = 0xBF;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  for (int i = 1; i < size; ++i) {
    if (static_cast<std::size_t>(i) == text.size()) return -1;
    const auto b = byte(static_cast<std::size_t>(i));
    if (b < low || b > high) return 0;
    low = 0x80, high = 0xBF;
  }
  return size;
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

}  // namespace efla
