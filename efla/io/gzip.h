// gzip files (RFC 1952) in memory, with a bound on what a file may unpack to.
#pragma once

#include <filesystem>
#include <string>

#include "efla/io/file.h"

namespace efla::io {

// Unpacks a gzip file of one or more members. Throws IoError(content) with the offset in the packed bytes where the
// stream is cut short, corrupt, followed by anything else, or unpacks to more than max_bytes.
Bytes gunzip(ByteView packed, const std::string& path, std::size_t max_bytes);

struct MaybeGzip {
  Bytes bytes;
  bool packed = false;
};

// Reads a file, and unpacks it if it is gzip. Throws IoError(content) if file or content has more than max_bytes.
MaybeGzip read_maybe_gzip(const std::filesystem::path& path, std::size_t max_bytes);

}  // namespace efla::io
