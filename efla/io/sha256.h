// SHA-256 (FIPS 180-4) through libcrypto, to check what was downloaded and what was written.
#pragma once

#include <memory>
#include <string>

#include "efla/io/file.h"

namespace efla::io {

// Returns 64 hexadecimal digits in lower case.
std::string sha256(ByteView bytes);

// The digest of bytes that come in several pieces.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(ByteView bytes);

  // Returns the digest of all bytes so far. The object may not be used afterwards.
  std::string digest();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace efla::io
