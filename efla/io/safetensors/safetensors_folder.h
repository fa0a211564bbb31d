// The tensors in a checkpoint's folder as Hugging Face writes it: model.safetensors, or shards and their index.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/safetensors/safetensors.h"

namespace efla::io {

inline constexpr const char* kWeightsFile = "model.safetensors";

class SafetensorsFolder {
 public:
  // Throws IoError(missing) if there is neither, and IoError(content) for an index that is invalid, names a file
  // outside of the folder, or contradicts its files.
  explicit SafetensorsFolder(const std::filesystem::path& folder);

  // Returns the path for messages: that of the file, or that of the index.
  const std::string& path() const { return path_; }
  // Returns the file that holds the tensor of that name, or null.
  const SafetensorsFile* file_with(std::string_view name) const;
  // Returns the sorted names of all tensors.
  std::vector<std::string> names() const;
  // Writes the files that hold the tensors to another folder, under their names and with checksums. An index is not
  // written.
  void write(const std::filesystem::path& folder) const;

 private:
  void open_shards(const std::filesystem::path& folder);

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*, std::less<>> where_;
};

}  // namespace efla::io
