// SHA-256 (FIPS 180-4), to check what was downloaded and what was written.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "efla/io/file.h"

namespace efla::io {

// 64 hexadecimal digits in lower case.
std::string sha256(ByteView bytes);

// The same of bytes that come in parts.
class Sha256 {
 public:
  Sha256();
  void update(ByteView bytes);
  // Of everything so far; ends the use of the object.
  std::string digest();

 private:
  std::array<std::uint32_t, 8> state_;
  std::array<std::uint8_t, 64> block_{};  // bytes that fill no block yet
  std::uint64_t size_ = 0;
};

}  // namespace efla::io
