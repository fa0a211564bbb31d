// IDX, the format of MNIST: a big-endian header (magic, extents) and then the bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "efla/io/file.h"

namespace efla::io {

struct IdxImages {
  std::int64_t count = 0, rows = 0, cols = 0;
  Bytes pixels;  // [count, rows, cols]
};

// Parse a file in memory; path is for messages. Throw IoError(content) with the byte offset if the magic is not that of
// images (00000803) or labels (00000801), if an image has no pixels, or if the size of the data contradicts the header.
IdxImages parse_idx_images(ByteView bytes, const std::string& path);
Bytes parse_idx_labels(ByteView bytes, const std::string& path);

// Read a file, plain or gzip. For gzip, offsets in messages count unpacked bytes, and the message says so.
IdxImages read_idx_images(const std::filesystem::path& path);
Bytes read_idx_labels(const std::filesystem::path& path);

}  // namespace efla::io
