// CRC-32C, the checksum of stored tensors and of event files.
#pragma once

#include <cstdint>

#include "efla/io/file.h"

namespace efla::io {

// Returns the CRC-32C (Castagnoli; RFC 3720, appendix B.4) of `bytes`. To compute the checksum of data in pieces, pass
// the checksum of all pieces so far as `before`. Uses the processor's instruction if the processor has one.
std::uint32_t crc32c(ByteView bytes, std::uint32_t before = 0);

// Returns the same checksum, computed without the instruction.
std::uint32_t crc32c_portable(ByteView bytes, std::uint32_t before = 0);

}  // namespace efla::io
