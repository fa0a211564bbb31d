// The JSON header of a safetensors file, parsed in one pass with the place of every entry. Used by safetensors_read.cc.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "efla/io/safetensors/safetensors.h"

namespace efla::io {

struct HeaderEntry {
  std::string name;
  std::size_t offset = 0;  // of the entry in the file
  TensorType type = TensorType::F32;
  std::vector<std::int64_t> shape;
  std::array<std::uint64_t, 2> data{};  // begin and end, from the end of the header
};

struct Header {
  std::vector<HeaderEntry> entries;
  std::map<std::string, std::string> metadata;
};

// Parses the text of the header, which starts at byte `start` of the file. Throws IoError(content).
Header parse_safetensors_header(ByteView text, std::size_t start, const std::string& path);

}  // namespace efla::io
