#include "efla/io/safetensors/safetensors_folder.h"

#include <nlohmann/json.hpp>

#include "efla/base/error.h"
#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/json.h"

namespace efla::io {
namespace {

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::size_t kLongestName = 255;  // of a file, in the usual file systems

// Returns whether a text can be the name of a file in a folder.
bool is_file_name(const std::string& name) {
  return !name.empty() && name.size() <= kLongestName && name.find('\0') == std::string::npos && name != "." &&
         name != ".." && std::filesystem::path(name).filename() == name;
}

}  // namespace

SafetensorsFolder::SafetensorsFolder(const std::filesystem::path& folder) {
  if (std::filesystem::exists(folder / kWeightsFile)) {
    files_.push_back(std::make_unique<SafetensorsFile>(folder / kWeightsFile));
    path_ = files_.back()->path();
    for (const auto& tensor : files_.back()->tensors()) where_[tensor.name] = files_.back().get();
  } else if (std::filesystem::exists(folder / kIndex)) {
    open_shards(folder);
  } else {
    throw IoError(IoError::Kind::missing, folder.string(), -1,
                  std::string("has neither ") + kWeightsFile + " nor " + kIndex);
  }
}

void SafetensorsFolder::open_shards(const std::filesystem::path& folder) {
  path_ = (folder / kIndex).string();
  const auto index = read_json(folder / kIndex);
  Fields(index, refuse_in_file(path_)).object("weight_map");
  std::map<std::string, const SafetensorsFile*> opened;
  for (const auto& [name, value] : index["weight_map"].items()) {
    const auto shard = value.is_string() ? value.get<std::string>() : std::string();
    if (!is_file_name(shard)) {
      fail_in(path_, "gives tensor " + printable(name) + " the file " + printable(value.dump()) +
                         ", expected the name of one beside it");
    }
    auto& file = opened[shard];
    if (file == nullptr) {
      files_.push_back(std::make_unique<SafetensorsFile>(folder / shard));
      file = files_.back().get();
    }
    if (file->find(name) == nullptr)
      fail_in(file->path(), "has no tensor " + printable(name) + ", which the index names");
    where_[name] = file;
  }
  for (const auto& file : files_) {
    for (const auto& tensor : file->tensors()) {
      if (file_with(tensor.name) != file.get()) {
        fail_in(file->path(), "has a tensor " + printable(tensor.name) + " that the index does not place there");
      }
    }
  }
}

const SafetensorsFile* SafetensorsFolder::file_with(std::string_view name) const {
  const auto found = where_.find(name);
  return found == where_.end() ? nullptr : found->second;
}

std::vector<std::string> SafetensorsFolder::names() const {
  std::vector<std::string> all;
  for (const auto& [name, file] : where_) all.push_back(name);
  return all;
}

void SafetensorsFolder::write(const std::filesystem::path& folder) const {
  for (const auto& file : files_) {
    write_safetensors(folder / std::filesystem::path(file->path()).filename(), file->tensors(), file->metadata());
  }
}

}  // namespace efla::io
