// The weights of linear layers as inference stores them. A decode step reads every weight once, so that the size of the
// weights bounds its speed.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/ops/context.h"
#include "efla/rule/linear.h"

namespace efla::nn {

// int8: per row and kScaleBlock columns a float32 scale, the largest |weight| / 127. Arithmetic is in float32.
enum class WeightType { float32, bfloat16, int8 };

// Return the type with a name, "float32", "bfloat16" or "int8", and the name of a type. parse_weight_type throws Error
// for another name.
WeightType parse_weight_type(const std::string& name);
std::string_view name_of(WeightType type);

// One or more weights [n, D], whose outputs lie side by side.
class PackedWeight {
 public:
  PackedWeight() = default;
  // The parts are float32 tensors [n, D] on the CPU. A weight of type float32 shares their memory.
  PackedWeight(const std::vector<torch::Tensor>& parts, WeightType type);

  std::int64_t outputs() const { return outputs_; }
  std::size_t bytes() const;
  // Writes x [M, D] times the transpose of the weight to y [M, outputs()]: the same bits for any M and any pool.
  void apply(const View<const float, 2>& x, const View<float, 2>& y, ThreadPool& pool) const;
  // Writes row n of the weight, float32 [D].
  void copy_row(std::int64_t n, float* to) const;
  // Returns the weights as float32 [outputs(), D].
  torch::Tensor widened() const;

 private:
  void append_row(const float* row);
  LinearForward narrow_problem() const;  // of a bfloat16 or int8 weight, without x and y

  WeightType type_ = WeightType::float32;
  std::int64_t outputs_ = 0, columns_ = 0;
  std::vector<torch::Tensor> wide_;
  std::vector<bfloat16> narrow_;
  std::vector<std::int8_t> bytes_;
  std::vector<float> scales_;
};

}  // namespace efla::nn
