// SHA-256 (FIPS 180-4), to check what was downloaded.
#pragma once

#include <string>

#include "efla/io/file.h"

namespace efla::io {

// 64 hexadecimal digits in lower case.
std::string sha256(ByteView bytes);

}  // namespace efla::io
