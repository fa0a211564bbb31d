#include "efla/nn/families/tensor_source.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "efla/io/safetensors/safetensors_folder.h"
#include "efla/nn/families/gguf_tensors.h"
#include "efla/nn/families/quantised_weights.h"

namespace efla::nn {
namespace {

class FolderTensors final : public TensorSource {
 public:
  explicit FolderTensors(const std::filesystem::path& folder)
      : folder_(std::make_shared<const io::SafetensorsFolder>(folder)), quantised_(quantised_weights(*folder_)) {}

  const std::string& path() const override { return folder_->path(); }
  // The tensors of a quantised weight have its name together.
  std::vector<std::string> names() const override {
    std::set<std::string> parts;
    for (const auto& [name, weight] : quantised_) {
      for (const auto* part : weight.parts) parts.insert(part->name);
    }
    std::vector<std::string> names = folder_->names();
    std::erase_if(names, [&](const std::string& name) { return parts.contains(name); });
    for (const auto& [name, weight] : quantised_) names.push_back(name);
    std::ranges::sort(names);
    return names;
  }
  bool has(std::string_view name) const override {
    return quantised_.contains(name) || folder_->file_with(name) != nullptr;
  }
  SourceTensor read(const std::string& name, bool /*matrix*/) const override {
    if (const auto found = quantised_.find(name); found != quantised_.end()) return found->second.read(path(), name);
    return {.tensor = find(name), .owner = folder_};
  }
  const std::vector<std::int64_t>& shape(const std::string& name) const override {
    const auto found = quantised_.find(name);
    return found == quantised_.end() ? find(name).shape : found->second.shape;
  }
  std::vector<io::ByteView> stored(const std::string& name) const override {
    const auto found = quantised_.find(name);
    if (found == quantised_.end()) return {find(name).bytes};
    std::vector<io::ByteView> parts;
    for (const auto* part : found->second.parts) parts.push_back(part->bytes);
    return parts;
  }
  std::string conversions(WeightType weights) const override {
    std::map<std::string, int> counts;
    for (const auto& [name, weight] : quantised_) ++counts[name_of(weight.format)];
    const char* const to = weights == WeightType::int8   ? "int8"
                           : weights == WeightType::int4 ? "int4 and int8"
                                                         : "bfloat16";
    std::string text;
    for (const auto& [type, count] : counts) {
      text.append(text.empty() ? "" : ", ").append(type).append(" (").append(std::to_string(count));
      text.append(count == 1 ? " tensor) becomes " : " tensors) becomes ").append(to);
    }
    return text;
  }

 private:
  const io::NamedTensor& find(const std::string& name) const { return *folder_->file_with(name)->find(name); }

  std::shared_ptr<const io::SafetensorsFolder> folder_;
  std::map<std::string, QuantisedWeight, std::less<>> quantised_;
};

}  // namespace

std::shared_ptr<const TensorSource> open_tensors(const std::filesystem::path& path) {
  if (is_gguf(path)) return std::make_shared<const GgufTensors>(path);
  return std::make_shared<const FolderTensors>(path);
}

}  // namespace efla::nn
