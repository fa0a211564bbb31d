#include "efla/nn/families/tensor_source.h"

#include <algorithm>

#include "efla/io/safetensors/safetensors_folder.h"
#include "efla/nn/families/fp8_blocks.h"
#include "efla/nn/families/gguf_tensors.h"

namespace efla::nn {
namespace {

class FolderTensors final : public TensorSource {
 public:
  explicit FolderTensors(const std::filesystem::path& folder)
      : folder_(std::make_shared<const io::SafetensorsFolder>(folder)) {}

  const std::string& path() const override { return folder_->path(); }
  // Scales of blocks belong to their weights.
  std::vector<std::string> names() const override {
    std::vector<std::string> names = folder_->names();
    std::erase_if(names, [&](const std::string& name) {
      return name.ends_with(kFp8Scales) && is_fp8(name.substr(0, name.size() - kFp8Scales.size()));
    });
    return names;
  }
  bool has(std::string_view name) const override { return folder_->file_with(name) != nullptr; }
  SourceTensor read(const std::string& name, bool /*matrix*/) const override {
    const auto scales = name + std::string(kFp8Scales);
    if (is_fp8(name) && has(scales)) return from_fp8_blocks(path(), find(name), find(scales));
    return {.tensor = find(name), .owner = folder_};
  }
  const std::vector<std::int64_t>& shape(const std::string& name) const override { return find(name).shape; }
  io::ByteView stored(const std::string& name) const override { return find(name).bytes; }
  std::string conversions(WeightType weights) const override {
    const auto names = folder_->names();
    const auto count = std::ranges::count_if(names, [&](const std::string& name) { return is_fp8(name); });
    if (count == 0) return "";
    const char* const to = weights == WeightType::int8   ? "int8"
                           : weights == WeightType::int4 ? "int4 and int8"
                                                         : "bfloat16";
    return "F8_E4M3 (" + std::to_string(count) + (count == 1 ? " tensor) becomes " : " tensors) becomes ") + to;
  }

 private:
  bool is_fp8(const std::string& name) const { return has(name) && find(name).type == io::TensorType::F8_E4M3; }
  const io::NamedTensor& find(const std::string& name) const { return *folder_->file_with(name)->find(name); }

  std::shared_ptr<const io::SafetensorsFolder> folder_;
};

}  // namespace

std::shared_ptr<const TensorSource> open_tensors(const std::filesystem::path& path) {
  if (is_gguf(path)) return std::make_shared<const GgufTensors>(path);
  return std::make_shared<const FolderTensors>(path);
}

}  // namespace efla::nn
