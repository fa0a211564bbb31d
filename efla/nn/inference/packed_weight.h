// The weights of linear layers as inference stores them. A decode step reads every weight once, so that the size of the
// weights bounds its speed.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/ops/context.h"
#include "efla/rule/linear.h"

namespace efla::nn {

// int8: per row and kScaleBlock columns a float32 scale, the largest |weight| / 127. int4: blocks of Q4_0
// (quant_block.h), per row and 32 columns a float16 scale, the weight of the largest magnitude / −8; int8 where rows
// are no whole blocks. Arithmetic is in float32.
enum class WeightType { float32, bfloat16, int8, int4 };

constexpr bool is_integer(WeightType type) { return type == WeightType::int8 || type == WeightType::int4; }

// Returns the type for weights that lose too much with four bits: all but those of MLPs and experts.
constexpr WeightType at_least_int8(WeightType type) { return type == WeightType::int4 ? WeightType::int8 : type; }

// Return the type with a name, "float32", "bfloat16", "int8" or "int4", and the name of a type. parse_weight_type
// throws Error for another name.
WeightType parse_weight_type(const std::string& name);
std::string_view name_of(WeightType type);

// A matrix of float32, bfloat16 or quantised blocks in memory that `owner` keeps.
struct StoredMatrix {
  View<const float, 2> wide = {};
  View<const bfloat16, 2> narrow = {};  // instead of `wide`
  QuantMatrix blocks = {};              // instead of both
  std::shared_ptr<const void> owner = {};
  bool keep = false;  // its type in every PackedWeight, because few numbers decide much
};

// Returns some neighbouring rows of a matrix, in the same memory.
StoredMatrix rows_of(const StoredMatrix& matrix, std::int64_t first, std::int64_t count);

// One or more weights [n, D], whose outputs lie side by side.
class PackedWeight {
 public:
  PackedWeight() = default;
  // The parts are float32 tensors [n, D] on the CPU. A weight of type float32 shares their memory.
  PackedWeight(const std::vector<torch::Tensor>& parts, WeightType type);
  // Shares the memory of a matrix whose elements the type holds: float32 holds bfloat16, which stays as it is. Blocks
  // stay as they are with every type. rounds_x: whether apply() may round x to bfloat16 beside weights in bfloat16 or
  // in blocks (rule/linear.h), except for parts to keep.
  PackedWeight(std::span<const StoredMatrix> parts, WeightType type, bool rounds_x = false);

  std::int64_t outputs() const { return outputs_; }
  std::size_t bytes() const;
  // Writes x [M, D] times the transpose of the weight to y [M, outputs()]: the same bits for any M and any pool.
  void apply(const View<const float, 2>& x, const View<float, 2>& y, ThreadPool& pool) const;
  // Writes row n of the weight, float32 [D].
  void copy_row(std::int64_t n, float* to) const;
  // Returns the weights as float32 [outputs(), D].
  torch::Tensor widened() const;

 private:
  // Views of one of the types, without x and y, and what keeps their memory.
  struct Part {
    LinearForward problem;
    std::shared_ptr<const void> owner;
  };
  static Part rounded(const LinearForward& from);
  static Part quantised(const LinearForward& from);
  static Part four_bits(const LinearForward& from);

  std::int64_t outputs_ = 0, columns_ = 0;
  std::vector<Part> parts_;
};

}  // namespace efla::nn
