#include "efla/serve/api/base64.h"

#include <openssl/evp.h>

#include <algorithm>

namespace efla::serve {
namespace {

// libcrypto counts in int: whole groups of three bytes and of four characters, each below 2³¹.
constexpr std::size_t kBytes = 3 << 28, kCharacters = 4 << 28;

constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

unsigned char* to_unsigned(char* text) { return reinterpret_cast<unsigned char*>(text); }
const unsigned char* to_unsigned(const char* text) { return reinterpret_cast<const unsigned char*>(text); }

}  // namespace

std::string to_base64(std::string_view bytes) {
  std::string text((bytes.size() + 2) / 3 * 4, '\0');
  auto* out = to_unsigned(text.data());
  for (; !bytes.empty(); bytes.remove_prefix(std::min(bytes.size(), kBytes))) {
    out += EVP_EncodeBlock(out, to_unsigned(bytes.data()), static_cast<int>(std::min(bytes.size(), kBytes)));
  }
  return text;
}

std::optional<std::string> from_base64(std::string_view text) {
  // EVP_DecodeBlock accepts blanks around the text and padding anywhere.
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  const auto digits = text.substr(0, text.size() - padding);
  if (text.size() % 4 != 0 || digits.find_first_not_of(kDigits) != std::string_view::npos) return std::nullopt;
  std::string bytes(text.size() / 4 * 3, '\0');
  auto* out = to_unsigned(bytes.data());
  for (; !text.empty(); text.remove_prefix(std::min(text.size(), kCharacters))) {
    out += EVP_DecodeBlock(out, to_unsigned(text.data()), static_cast<int>(std::min(text.size(), kCharacters)));
  }
  bytes.resize(bytes.size() - padding);
  return bytes;
}

}  // namespace efla::serve
