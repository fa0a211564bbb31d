#include "efla/serve/api/state_keys.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "efla/io/safetensors/safetensors.h"
#include "efla/io/safetensors/safetensors_checksum.h"
#include "efla/serve/api/error.h"

namespace efla::serve {
namespace {

constexpr std::size_t kSignatureDigits = 64;
constexpr std::string_view kSignatureField = "\"signature\":\"";

std::string hmac(const std::string& key, std::string_view bytes) {
  std::array<unsigned char, kSignatureDigits / 2> sum{};
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), data, bytes.size(), sum.data(), nullptr) ==
      nullptr) {
    throw std::runtime_error("libcrypto cannot compute HMAC-SHA256");
  }
  std::string digits;
  for (const auto byte : sum) digits += fmt::format("{:02x}", byte);
  return digits;
}

// Returns where in the header of a file of safetensors its signature begins, or npos.
std::size_t place_of_signature(std::string_view file) {
  std::uint64_t size = 0;
  if (file.size() < sizeof(size)) return std::string_view::npos;
  std::memcpy(&size, file.data(), sizeof(size));
  const auto header = file.substr(0, std::min<std::uint64_t>(file.size(), size + sizeof(size)));
  const auto at = header.find(kSignatureField, sizeof(size));
  const bool whole = at != std::string_view::npos && at + kSignatureField.size() + kSignatureDigits <= header.size();
  return whole ? at + kSignatureField.size() : std::string_view::npos;
}

}  // namespace

std::string StateKeys::sign(std::string file) const {
  if (keys_.empty()) return file;
  auto [tensors, metadata] = io::parse_safetensors(io::as_bytes(file), "state");
  metadata[io::kSignature] = std::string(kSignatureDigits, '0');
  std::string made = io::safetensors_bytes(tensors, metadata);
  made.replace(place_of_signature(made), kSignatureDigits, hmac(keys_.front(), made));
  return made;
}

void StateKeys::require_signature(std::string_view file, const std::string& field) const {
  if (keys_.empty()) return;
  const auto at = place_of_signature(file);
  if (at == std::string_view::npos) {
    throw ApiError(400, field + ": got a state without a signature, expected one that this server gave", field);
  }
  std::string blank(file);
  const std::string signature = blank.substr(at, kSignatureDigits);
  blank.replace(at, kSignatureDigits, kSignatureDigits, '0');
  for (const auto& key : keys_) {
    if (CRYPTO_memcmp(hmac(key, blank).data(), signature.data(), kSignatureDigits) == 0) return;
  }
  throw ApiError(400, field + ": got a state with a wrong signature, expected one that this server gave", field);
}

}  // namespace efla::serve
