// SwiGLU as a LibTorch function with a gradient.
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// Returns silu(gate) · up, of one shape and type [..., D]. On a GPU one kernel computes it, and one both gradients, for
// float32 and bfloat16. Throws Error for a bad argument.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace efla::autograd
