// The step between two branches of a residual network as a LibTorch function with a gradient.
#pragma once

#include <ATen/ATen.h>

#include <utility>

namespace efla::autograd {

// Returns {x + branch, rms_norm(x + branch, weight, eps)}. x [..., D] is the stream; branch has its shape, undefined:
// zeros; weight [D] is float32. On a GPU one kernel computes both, and one the gradients; the norm then has the type in
// which autocast computes products, and a branch of this type is taken as it is. Throws Error for a bad argument.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                               double eps = 1e-6);

}  // namespace efla::autograd
