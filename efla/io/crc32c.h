// CRC-32C, the checksum of stored tensors and of event files.
#pragma once

#include <cstdint>

#include "efla/io/file.h"

namespace efla::io {

// Returns the CRC-32C (Castagnoli; RFC 3720, appendix B.4) of the bytes that `before` is the checksum of, followed by
// `bytes`. Uses the processor's instruction where there is one.
std::uint32_t crc32c(ByteView bytes, std::uint32_t before = 0);

// Computes the same without the instruction.
std::uint32_t crc32c_portable(ByteView bytes, std::uint32_t before = 0);

}  // namespace efla::io
