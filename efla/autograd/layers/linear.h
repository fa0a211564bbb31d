// Linear layers (docs/ops/linear.md).
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// Returns x [..., D] times the transpose of weight [N, D], plus bias [N] where one is defined: [..., N]. If a gradient
// is needed, LibTorch computes the product. Otherwise, on the CPU in float32, the operator (ops/layers/linear.h)
// computes a few rows, as in decoding. Many rows are distributed to the operators' threads if LibTorch is set to one
// thread (at::set_num_threads), because threads of LibTorch or of the BLAS would disturb them. Throws LibTorch's error
// if the shapes do not fit.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// The operations before and after a product, as in rule/linear.h.
struct LinearFusion {
  at::Tensor norm_weight = {};  // [D]; undefined: no norm
  double norm_eps = 1e-6;
  bool swiglu = false;
  at::Tensor residual = {};  // [M, N] or undefined
};

// Returns x [M, D] float32 times the transpose of the weight [N, D], float32 or bfloat16, with the operations in
// `with`. If an implementation of the operator takes the problem, as for a few rows on a Hopper GPU, one kernel
// computes everything. Otherwise LibTorch's operators do, with the input and the result of the product rounded to the
// type of the weight. Not differentiable. Throws Error for a bad argument.
at::Tensor fused_linear(const at::Tensor& x, const at::Tensor& weight, const LinearFusion& with = {});

}  // namespace efla::autograd
