// The checksums of a safetensors file. They are the metadata "efla.crc32c": the CRC-32C of all other metadata, then one
// CRC-32C per tensor in the order of the tensors' data, each as eight hexadecimal digits. Other readers of the format
// see one more text in the metadata.
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

// Compares the checksums of a parsed file, if it has any, and removes them from the metadata. `start` is the start of
// the file. Throws IoError(content) that names the first damaged tensor, or the metadata.
void check_checksums(ByteView start, SafetensorsContent& content, const std::string& path);

}  // namespace efla::io
