// The step between two branches of a residual network as a LibTorch function with gradients (docs/ops/add_rms_norm.md).
#pragma once

#include <ATen/ATen.h>

#include <utility>

namespace efla::autograd {

// Returns {x + branch, rms_norm(x + branch, weight, eps)}. x [..., D] is the residual stream; branch has the shape of
// x, undefined: zeros; weight is [D]. On a GPU with x and weight in float32 one kernel computes both results, and one
// kernel the gradients. The norm then has the type in which autocast computes products, and a branch of this type is
// not converted. Throws Error for a bad argument.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                               double eps = 1e-6);

}  // namespace efla::autograd
