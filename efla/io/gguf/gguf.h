// GGUF, the file format of llama.cpp: typed metadata, then the names and shapes of tensors, then their data in blocks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "efla/io/file.h"

namespace efla::io {

// Returns whether a path names a GGUF file.
inline bool is_gguf(const std::filesystem::path& path) { return path.extension() == ".gguf"; }

// A type of tensors. A block has neighbouring numbers of a row.
struct GgufType {
  std::uint32_t id;
  std::string_view name;
  std::int64_t elements, bytes;  // of a block
};

// Return the type with an id in files, or with a name; null for none.
const GgufType* find_gguf_type(std::uint32_t id);
const GgufType* find_gguf_type(std::string_view name);

// One tensor. Its bytes belong to the file. shape: as PyTorch gives it, with rows last.
struct GgufTensor {
  std::string name;
  const GgufType* type = nullptr;
  std::vector<std::int64_t> shape;
  ByteView bytes;
};

// A value of the metadata. Integers of every width are int64. Booleans in arrays are integers. Texts belong to the
// file.
using GgufValue = std::variant<bool, std::int64_t, double, std::string_view, std::vector<std::int64_t>,
                               std::vector<double>, std::vector<std::string_view>>;
using GgufMetadata = std::map<std::string, GgufValue, std::less<>>;

struct GgufContent {
  GgufMetadata metadata;
  std::vector<GgufTensor> tensors;  // in the order of the file
};

// Parses a file of version 2 or 3 in memory; the content points into bytes. Throws IoError(content) with the byte
// offset for anything that the format does not allow: a file that is cut short, an unknown version or type, a size that
// overflows, a name given twice, data that is not aligned, overlaps or ends beyond the file. path is for messages.
GgufContent parse_gguf(ByteView bytes, const std::string& path);

// A mapped file and its tensors. A model that is split over files NAME-00001-of-0000N.gguf is opened by its first file,
// and has the tensors of all files.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  const std::string& path() const { return files_.front().path(); }
  const GgufMetadata& metadata() const { return content_.metadata; }
  const std::vector<GgufTensor>& tensors() const { return content_.tensors; }
  // Returns the tensor of that name, or null.
  const GgufTensor* find(std::string_view name) const;
  // Return the value of a key of this type, or null if there is no such key. Throw IoError(content) for another type.
  const std::string_view* text(std::string_view key) const { return value<std::string_view>(key, "a text"); }
  const std::int64_t* integer(std::string_view key) const { return value<std::int64_t>(key, "an integer"); }
  const std::vector<std::int64_t>* integers(std::string_view key) const {
    return value<std::vector<std::int64_t>>(key, "an array of integers");
  }
  const std::vector<std::string_view>* texts(std::string_view key) const {
    return value<std::vector<std::string_view>>(key, "an array of texts");
  }

 private:
  template <class T>
  const T* value(std::string_view key, const char* expected) const {
    const auto found = content_.metadata.find(key);
    if (found == content_.metadata.end()) return nullptr;
    const T* value = std::get_if<T>(&found->second);
    if (value == nullptr) refuse(key, expected);
    return value;
  }
  [[noreturn]] void refuse(std::string_view key, const char* expected) const;
  void open_others();

  std::vector<MappedFile> files_;
  GgufContent content_;
  std::map<std::string_view, std::size_t> where_;  // numbers of tensors by name
};

}  // namespace efla::io
