// Linear layers.
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// Returns x [..., D] times the transpose of weight [N, D], plus bias [N] where one is defined: [..., N]. Where a
// gradient is needed, this is LibTorch's product. Otherwise, on the CPU in float32, a few rows, as in decoding, are the
// operator's (ops/linear.h). Many rows are distributed to the operators' threads if LibTorch is set to one thread
// (at::set_num_threads), because LibTorch's and BLAS's own threads would only disturb them. Throws LibTorch's error
// where the shapes do not fit.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// What stands before and after a product, as in rule/linear.h.
struct LinearFusion {
  at::Tensor norm_weight = {};  // [D]; undefined: no norm
  double norm_eps = 1e-6;
  bool swiglu = false;
  at::Tensor residual = {};  // [M, N] or undefined
};

// Returns x [M, D] float32 times the transpose of the weight [N, D], float32 or bfloat16, with what `with` says. For a
// few rows on a GPU one kernel computes all of it; elsewhere LibTorch's operators do, with x and the product rounded to
// the type of the weight. Not differentiable. Throws Error for a bad argument.
at::Tensor fused_linear(const at::Tensor& x, const at::Tensor& weight, const LinearFusion& with = {});

}  // namespace efla::autograd
