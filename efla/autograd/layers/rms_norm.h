// RMS normalisation on tensors, differentiable. Registered as the ops efla::rms_norm and efla::gated_rms_norm too.
#pragma once

#include <ATen/ATen.h>

#include "efla/rule/rms_norm.h"

namespace efla::autograd {

// x / √(mean(x²) + eps) · weight over the last dimension. x [..., D] float32 or bfloat16; weight [D], undefined for
// ones. On devices for which this build has no kernel by LibTorch's operators. Throws Error naming the tensor.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps = 1e-6);

// The same times act(gate). gate [..., D], of the shape and the dtype of x.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                          GateActivation activation, double eps = 1e-6);

}  // namespace efla::autograd
