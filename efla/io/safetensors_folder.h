// The tensors of a checkpoint's folder as Hugging Face writes it: model.safetensors, or shards and their index.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/safetensors.h"

namespace efla::io {

class SafetensorsFolder {
 public:
  // Throws IoError(missing) where there is neither, and IoError(content) for an index that is not one, names a file
  // outside of the folder, or does not say what its files hold.
  explicit SafetensorsFolder(const std::filesystem::path& folder);

  // What names the whole in messages: the file, or the index.
  const std::string& path() const { return path_; }
  // Null where there is no tensor of that name.
  const SafetensorsFile* file_with(std::string_view name) const;
  // In the order of names.
  std::vector<std::string> names() const;

 private:
  void open_shards(const std::filesystem::path& folder);

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*, std::less<>> where_;
};

}  // namespace efla::io
