// The loss of a language model from its last hidden vectors, differentiable (docs/ops/cross_entropy.md).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "efla/base/ignore_index.h"

namespace efla::autograd {

// Returns the mean over n with targets[n] ≠ kIgnoreIndex of −log softmax(weight x[n])[targets[n]], or 0 without any.
// The result is a float32 scalar; x is [N, D], weight [V, D], targets [N] int64. The forward computes the logits slice
// by slice of the rows, and with each slice its gradients, so that the logits of all rows are never held at once.
// Throws Error that names the tensor. On the CPU also for targets out of range; on a GPU, for which the function does
// not wait, such a target makes the result NaN.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets);

// Throws Error for targets that are neither in [0, classes) nor kIgnoreIndex. Waits for a GPU.
void check_targets(const at::Tensor& targets, std::int64_t classes);

}  // namespace efla::autograd
