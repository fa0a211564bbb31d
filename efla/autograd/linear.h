// A linear layer without bias.
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// x [..., D] times weight [N, D], transposed → [..., N]. LibTorch's product, and so differentiable, but for a few rows
// on the CPU where no gradient is asked for, as in decoding: those read the weight as it lies (cpu/linear.h). Throws
// LibTorch's error where the shapes do not fit.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight);

}  // namespace efla::autograd
