#include "efla/nn/families/tensor_source.h"

#include "efla/io/safetensors/safetensors_folder.h"
#include "efla/nn/families/gguf_tensors.h"

namespace efla::nn {
namespace {

class FolderTensors final : public TensorSource {
 public:
  explicit FolderTensors(const std::filesystem::path& folder)
      : folder_(std::make_shared<const io::SafetensorsFolder>(folder)) {}

  const std::string& path() const override { return folder_->path(); }
  std::vector<std::string> names() const override { return folder_->names(); }
  bool has(std::string_view name) const override { return folder_->file_with(name) != nullptr; }
  SourceTensor read(const std::string& name, bool /*matrix*/) const override {
    return {.tensor = find(name), .owner = folder_};
  }
  const std::vector<std::int64_t>& shape(const std::string& name) const override { return find(name).shape; }
  io::ByteView stored(const std::string& name) const override { return find(name).bytes; }

 private:
  const io::NamedTensor& find(const std::string& name) const { return *folder_->file_with(name)->find(name); }

  std::shared_ptr<const io::SafetensorsFolder> folder_;
};

}  // namespace

std::shared_ptr<const TensorSource> open_tensors(const std::filesystem::path& path) {
  if (is_gguf(path)) return std::make_shared<const GgufTensors>(path);
  return std::make_shared<const FolderTensors>(path);
}

}  // namespace efla::nn
