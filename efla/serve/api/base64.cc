#include "efla/serve/api/base64.h"

#include <array>
#include <cstdint>

namespace efla::serve {
namespace {

constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::array<std::int8_t, 256> values() {
  std::array<std::int8_t, 256> table{};
  table.fill(-1);
  for (std::size_t i = 0; i < kDigits.size(); ++i)
    table[static_cast<unsigned char>(kDigits[i])] = static_cast<std::int8_t>(i);
  return table;
}

}  // namespace

std::string to_base64(std::string_view bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const auto left = bytes.size() - i;
    const auto byte = [&](std::size_t at) { return at < left ? static_cast<std::uint8_t>(bytes[i + at]) : 0U; };
    const std::uint32_t bits = byte(0) << 16 | byte(1) << 8 | byte(2);
    text += kDigits[bits >> 18];
    text += kDigits[bits >> 12 & 63];
    text += left > 1 ? kDigits[bits >> 6 & 63] : '=';
    text += left > 2 ? kDigits[bits & 63] : '=';
  }
  return text;
}

std::optional<std::string> from_base64(std::string_view text) {
  static constexpr auto kValues = values();
  if (text.size() % 4 != 0) return std::nullopt;
  std::size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (std::size_t i = 0; i < text.size(); i += 4) {
    std::uint32_t bits = 0;
    for (std::size_t j = 0; j < 4; ++j) {
      const bool pad = i + j >= text.size() - padding;
      const auto value = pad ? std::int8_t{0} : kValues[static_cast<unsigned char>(text[i + j])];
      if (value < 0) return std::nullopt;
      bits = bits << 6 | static_cast<std::uint32_t>(value);
    }
    for (const int shift : {16, 8, 0}) bytes += static_cast<char>(bits >> shift & 255);
  }
  bytes.resize(bytes.size() - padding);
  return bytes;
}

}  // namespace efla::serve
