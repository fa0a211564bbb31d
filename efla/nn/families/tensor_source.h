// Where the tensors of a model of a family come from: a folder of safetensors, or a GGUF file. Both have the names that
// transformers gives them.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "efla/base/quant_block.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/nn/inference/packed_weight.h"

namespace efla::nn {

// A tensor whose memory `owner` keeps.
struct SourceTensor {
  io::NamedTensor tensor;   // without bytes where there are blocks
  QuantMatrix blocks = {};  // of a quantised matrix
  std::shared_ptr<const void> owner;
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // Returns the path for messages.
  virtual const std::string& path() const = 0;
  // Returns the sorted names of all tensors.
  virtual std::vector<std::string> names() const = 0;
  virtual bool has(std::string_view name) const = 0;
  // Returns a tensor that is there. matrix: whether it is the weight of a linear layer, whose quantised blocks stay as
  // they are if kernels multiply them, and are rounded to bfloat16 if not, as are weights in several tensors. Throws
  // IoError(content) for a type that cannot be read.
  virtual SourceTensor read(const std::string& name, bool matrix) const = 0;
  // Return the shape of a tensor that is there, and the bytes of all its parts as they are stored.
  virtual const std::vector<std::int64_t>& shape(const std::string& name) const = 0;
  virtual std::vector<io::ByteView> stored(const std::string& name) const = 0;
  // Returns whether zero-centred norms have 1 added already.
  virtual bool has_whole_norms() const { return false; }
  // Returns which weights of linear layers are in memory in another type than in the files, for people, such as
  // "Q3_K (12 tensors) becomes bfloat16"; "": none. weights: what is asked of the model.
  virtual std::string conversions(WeightType weights) const = 0;
};

// Opens a folder or a GGUF file. Throws IoError for what is neither.
std::shared_ptr<const TensorSource> open_tensors(const std::filesystem::path& path);

}  // namespace efla::nn
