// RMS normalisation on tensors, differentiable (docs/ops/rms_norm.md). rms_norm.cc registers the functions as the ops
// efla::rms_norm and efla::gated_rms_norm.
#pragma once

#include <ATen/ATen.h>

#include "efla/rule/rms_norm.h"

namespace efla::autograd {

// Returns x / √(mean(x²) + eps) · weight over the last dimension. x [..., D] is float32 or bfloat16; weight is [D],
// undefined: ones. LibTorch's operators compute it on devices for which this build has no kernel. Throws Error that
// names the tensor.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps = 1e-6);

// Returns the same times act(gate) (rule/gate_activation.h). gate has the shape and the dtype of x.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                          GateActivation activation, double eps = 1e-6);

}  // namespace efla::autograd
