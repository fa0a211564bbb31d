#include "efla/io/sha256.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>
#include <new>
#include <stdexcept>

namespace efla::io {

struct Sha256::Context {
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> evp{EVP_MD_CTX_new(), &EVP_MD_CTX_free};
};

namespace {

void require_success(int result) {
  if (result != 1) throw std::runtime_error("libcrypto cannot compute SHA-256");
}

}  // namespace

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  if (context_->evp == nullptr) throw std::bad_alloc();
  require_success(EVP_DigestInit_ex(context_->evp.get(), EVP_sha256(), nullptr));
}

Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(ByteView bytes) {
  require_success(EVP_DigestUpdate(context_->evp.get(), bytes.data(), bytes.size()));
}

std::string Sha256::digest() {
  std::array<unsigned char, 32> bytes{};
  require_success(EVP_DigestFinal_ex(context_->evp.get(), bytes.data(), nullptr));
  std::string digits;
  for (const auto byte : bytes) digits += fmt::format("{:02x}", byte);
  return digits;
}

std::string sha256(ByteView bytes) {
  Sha256 sum;
  sum.update(bytes);
  return sum.digest();
}

}  // namespace efla::io
