// A linear layer without bias.
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// Returns x [..., D] times the transpose of weight [N, D]: [..., N]. Where a gradient is needed, this is LibTorch's
// product. Otherwise, on the CPU in float32, a few rows, as in decoding, are the operator's (ops/linear.h). Many rows
// are distributed to the operators' threads if LibTorch is set to one thread (at::set_num_threads), because LibTorch's
// and BLAS's own threads would only disturb them. Throws LibTorch's error where the shapes do not fit.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight);

}  // namespace efla::autograd
