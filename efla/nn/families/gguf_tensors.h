// The tensors of a model of a family in a GGUF file, under transformers' names and in its order.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/gguf/gguf.h"
#include "efla/nn/families/gguf_config.h"
#include "efla/nn/families/tensor_source.h"

namespace efla::nn {

// Undoes what llama.cpp's converter does: it writes −exp(A_log), and puts value head h = g · r + j of key head g, of
// r per key head, at j · H + g, where H is the number of key heads. Norms keep the 1 that it adds.
class GgufTensors final : public TensorSource {
 public:
  explicit GgufTensors(const std::filesystem::path& path);

  const std::string& path() const override { return file_->path(); }
  std::vector<std::string> names() const override;
  bool has(std::string_view name) const override { return tensors_.contains(name); }
  SourceTensor read(const std::string& name, bool matrix) const override;
  const std::vector<std::int64_t>& shape(const std::string& name) const override { return find(name).shape; }
  std::vector<io::ByteView> stored(const std::string& name) const override { return {find(name).bytes}; }
  bool has_whole_norms() const override { return true; }
  std::string conversions(WeightType weights) const override;

 private:
  const io::GgufTensor& find(const std::string& name) const { return *tensors_.find(name)->second; }
  SourceTensor as_stored(const std::string& name) const {
    const io::GgufTensor& tensor = find(name);
    return {.tensor = {name, io::TensorType::F32, tensor.shape, tensor.bytes}, .owner = file_};
  }
  bool is_turned(std::string_view part) const;
  std::optional<QuantType> kept_blocks(const std::string& name) const;
  SourceTensor numbers_of(const std::string& name, bool matrix) const;
  std::shared_ptr<io::Bytes> in_order(const io::GgufTensor& tensor, std::string_view part, io::ByteView bytes,
                                      std::int64_t row_bytes) const;
  std::shared_ptr<io::Bytes> logarithms_of(const io::GgufTensor& tensor, io::ByteView bytes) const;

  std::shared_ptr<const io::GgufFile> file_;
  std::map<std::string, const io::GgufTensor*, std::less<>> tensors_;
  std::int64_t key_heads_ = 0, value_heads_ = 0, value_dim_ = 0, key_rows_ = 0;  // key_rows_: of q and k, above v
};

}  // namespace efla::nn
