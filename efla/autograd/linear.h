// A linear layer without bias.
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// x [..., D] times weight [N, D], transposed → [..., N]. LibTorch's product where a gradient is asked for. Without, on
// the CPU in float32: a few rows, as in decoding, read the weight as it lies (cpu/linear.h), and where LibTorch is set
// to one thread (at::set_num_threads), many rows are shared out to the operators' threads, which LibTorch's and BLAS's
// own would only disturb. Throws LibTorch's error where the shapes do not fit.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight);

}  // namespace efla::autograd
