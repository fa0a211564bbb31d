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

// From memory; path is for messages. Throw IoError(content) with the byte offset where the magic is not that of images
// (00000803) or labels (00000801), an image has no pixels, or the data is shorter or longer than the header says.
IdxImages parse_idx_images(ByteView bytes, const std::string& path);
Bytes parse_idx_labels(ByteView bytes, const std::string& path);

// From a file, plain or gzip; of gzip, offsets count unpacked bytes, and the message says so.
IdxImages read_idx_images(const std::filesystem::path& path);
Bytes read_idx_labels(const std::filesystem::path& path);

}  // namespace efla::io
