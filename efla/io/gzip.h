// gzip (RFC 1952) through zlib, with a bound on the unpacked size of a file.
#pragma once

#include <filesystem>
#include <string>

#include "efla/io/file.h"

namespace efla::io {

// Returns whether the bytes start like a gzip file (1f 8b).
bool is_gzip(ByteView bytes);

// Unpacks a gzip file of one or more members. Throws IoError(content) with the offset in the packed bytes if the stream
// is truncated, corrupt, followed by other data, or unpacks to more than max_bytes.
Bytes gunzip(ByteView packed, const std::string& path, std::size_t max_bytes);

struct MaybeGzip {
  Bytes bytes;
  bool packed = false;
};

// Reads a file and unpacks it if it is gzip; at most max_bytes either way.
MaybeGzip read_maybe_gzip(const std::filesystem::path& path, std::size_t max_bytes);

}  // namespace efla::io
