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

// The name in the header ("F32"), its reverse, and the size of an element in bytes.
std::string_view type_name(TensorType type);
std::optional<TensorType> type_from_name(std::string_view name);
std::size_t type_bytes(TensorType type);

// A name from a file as messages show it: without control characters, and at most 200 bytes of it.
std::string printable(const std::string& name);

// One tensor; bytes (row-major, little-endian) belong to the file or to the caller and need not be aligned: copy them
// out with memcpy.
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

// Reads the header in memory; the tensors point into bytes. Throws IoError(content) with the byte offset for anything
// that the format does not allow: a header that is cut short, above 100 MB or not the JSON expected; a name twice; an
// unknown dtype; a size that overflows or is not that of the shape; data that overlaps, leaves gaps, or does not end
// where the file does. path is for messages.
SafetensorsContent parse_safetensors(ByteView bytes, const std::string& path);

// A mapped file and what is in it.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<NamedTensor>& tensors() const { return content_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return content_.metadata; }
  // Null where there is none of that name.
  const NamedTensor* find(std::string_view name) const;

 private:
  MappedFile file_;
  SafetensorsContent content_;
};

// Writes the tensors in the order given; the data begins at a multiple of 8 bytes. Throws efla::Error for a name given
// twice or not UTF-8 and for bytes that do not fit the shape, before anything is written.
void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace efla::io
