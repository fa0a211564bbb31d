// A gated MLP as a LibTorch function with gradients (docs/ops/glu.md).
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// Returns (silu(x gateᵀ) ⊙ (x upᵀ)) downᵀ, the SwiGLU of Shazeer (arXiv 2002.05202): [..., N]. x is [..., D], gate and
// up are [I, D], down is [N, I]. On a GPU, for products in float32 and bfloat16, one kernel computes h = silu(x gateᵀ)
// ⊙ (x upᵀ) from the two products. The backward computes h again, so that h need not be kept, and adds the two parts of
// the gradient of x within a product. Throws Error for a bad argument.
at::Tensor swiglu_mlp(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down);

}  // namespace efla::autograd
