// safetensors, the file format for named tensors: an 8-byte little-endian header size, a JSON header, the data.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/file.h"

namespace efla::io {

enum class TensorType { F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, U32, U16, U8, BOOL };

// Return the name in the header ("F32"), its inverse, and the size of an element in bytes.
std::string_view type_name(TensorType type);
std::optional<TensorType> type_from_name(std::string_view name);
std::size_t type_bytes(TensorType type);

// Returns a name from a file for messages: without control characters, at most 200 bytes.
std::string printable(const std::string& name);

// One tensor. Its bytes (row-major, little-endian) belong to the file or to the caller. They need not be aligned: copy
// them out with memcpy.
struct NamedTensor {
  std::string name;
  TensorType type = TensorType::F32;
  std::vector<std::int64_t> shape;
  ByteView bytes;
};

struct SafetensorsContent {
  std::vector<NamedTensor> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// Parses a file in memory; the tensors point into bytes. Throws IoError(content) with the byte offset for anything that
// the format does not allow: a header that is truncated, larger than 100 MB or not the expected JSON; a name given
// twice; an unknown dtype; a size that overflows or contradicts the shape; data that overlaps, leaves gaps, or does not
// end at the end of the file; a checksum that differs. The metadata returned has no checksums. path is for messages.
SafetensorsContent parse_safetensors(ByteView bytes, const std::string& path);

// A mapped file and its tensors.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<NamedTensor>& tensors() const { return content_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return content_.metadata; }
  // Returns the tensor of that name, or null.
  const NamedTensor* find(std::string_view name) const;

 private:
  MappedFile file_;
  SafetensorsContent content_;
};

// Writes the tensors in the given order, with checksums; the data starts at a multiple of 8 bytes. Throws efla::Error
// before anything is written if a name is given twice or is not UTF-8, or if bytes do not fit the shape.
void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

// Returns the bytes that write_safetensors would write. Throws the same Errors.
std::string safetensors_bytes(std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace efla::io
