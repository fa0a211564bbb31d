// The loss of a language model from its last hidden vectors, differentiable (docs/ops/cross_entropy.md).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "efla/base/ignore_index.h"

namespace efla::autograd {

// Returns the mean over n with targets[n] ≠ kIgnoreIndex of −log softmax(weight x[n])[targets[n]], or 0 without any.
// The result is a float32 scalar; x is [N, D], weight [V, D], targets [N] int64. The forward computes the logits slice
// by slice of the rows, and with each slice its gradients, so that the logits of all rows are never held at once.
// Throws Error that names the tensor, also for targets out of range.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets);

}  // namespace efla::autograd
