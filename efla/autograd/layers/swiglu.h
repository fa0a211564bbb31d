// SwiGLU and the product behind it as a LibTorch function with gradients.
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// Returns (silu(gate) · up) weightᵀ. gate and up have one shape and type [..., D], weight is [N, D]. On a GPU one
// kernel computes silu(gate) · up, for float32 and bfloat16; the backward computes it again, so that it need not be
// kept. Throws Error for a bad argument.
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight);

}  // namespace efla::autograd
