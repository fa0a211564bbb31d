// The contract of a linear layer without bias. docs/ops/linear.md describes the operator.
#pragma once

#include <cstdint>

#include "efla/base/dtype.h"
#include "efla/base/quant_block.h"
#include "efla/base/view.h"

namespace efla {

// Number of neighbouring columns of an int8 weight that share a scale.
inline constexpr std::int64_t kScaleBlock = 64;

// y[m, n] = Σ_d x[m, d] · weight[n, d]. The weight has one of four types; the views of the others are absent. The
// call can include the norm before the product, and SwiGLU and the residual after the product.
struct LinearForward {
  View<const float, 2> x;                       // [M, D]
  View<const float, 2> weight;                  // [N, D]
  View<float, 2> y;                             // [M, N]; with swiglu [M, N / 2]
  View<const bfloat16, 2> narrow_weight = {};   // [N, D]
  View<const std::int8_t, 2> byte_weight = {};  // [N, D]: weight[n, d] = scales[n, d / kScaleBlock] · byte[n, d]
  View<const float, 2> scales = {};             // [N, ⌈D / kScaleBlock⌉] of byte_weight
  QuantMatrix quant_weight = {};                // [N, D]
  // Whether x may be rounded to bfloat16 where a processor multiplies it faster by narrow_weight, or by the numbers of
  // quant_weight, which are then rounded too. The products and their sums are in float32 in any case.
  bool rounds_x = false;
  View<const float, 1> norm_weight = {};  // [D], optional: x is replaced by its RMS norm (rule/rms_norm.h)
  float norm_eps = 0.0F;
  bool swiglu = false;                 // y[m, n] = silu(z[m, n]) · z[m, N / 2 + n] of the products z [M, N]
  View<const float, 2> residual = {};  // as y, optional: added after swiglu; may be y itself

  // Returns N.
  std::int64_t outputs() const {
    if (quant_weight) return quant_weight.rows;
    return narrow_weight ? narrow_weight.extent[0] : byte_weight ? byte_weight.extent[0] : weight.extent[0];
  }
  // Returns whether the call includes more than the product.
  bool is_fused() const { return norm_weight || swiglu || residual; }
  // Returns weight[n, d] in any of the types.
  float weight_at(std::int64_t n, std::int64_t d) const {
    if (narrow_weight) return to_float(narrow_weight(n, d));
    if (quant_weight) return quant_weight.at(n, d);
    if (byte_weight) return scales(n, d / kScaleBlock) * static_cast<float>(byte_weight(n, d));
    return weight(n, d);
  }
};

// Throws Error as validate of rule/validate.h does.
void validate(const LinearForward& problem);

}  // namespace efla
