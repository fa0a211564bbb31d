// The checksums of a safetensors file: its metadata "efla.crc32c" has eight hexadecimal digits per CRC-32C, first that
// of the other metadata, then those of the tensors in the order of their data. Other readers of the format see a text
// in the metadata.
#pragma once

#include <map>
#include <span>
#include <string>

#include "efla/io/safetensors/safetensors.h"

namespace efla::io {

// Metadata that the checksums leave out, so that it can be filled in when the file is complete.
inline constexpr const char* kSignature = "signature";

// Adds the checksums to the metadata, or replaces them.
void add_checksums(std::span<const NamedTensor> tensors, std::map<std::string, std::string>& metadata);

// Compares the checksums of a parsed file, where it has any, and removes them from the metadata. `start` is the start
// of the file. Throws IoError(content) that names the first tensor that is damaged.
void check_checksums(ByteView start, SafetensorsContent& content, const std::string& path);

}  // namespace efla::io
