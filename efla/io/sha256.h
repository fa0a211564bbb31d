// SHA-256 (FIPS 180-4), which checks files that were downloaded or written.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "efla/io/file.h"

namespace efla::io {

// Returns the digest as 64 lower-case hexadecimal digits.
std::string sha256(ByteView bytes);

// Computes the digest of bytes that arrive in pieces.
class Sha256 {
 public:
  Sha256();
  void update(ByteView bytes);
  // Returns the digest of all bytes so far. The object must not be used afterwards.
  std::string digest();

 private:
  std::array<std::uint32_t, 8> state_;
  std::array<std::uint8_t, 64> block_{};  // bytes that do not fill a block yet
  std::uint64_t size_ = 0;
};

}  // namespace efla::io
