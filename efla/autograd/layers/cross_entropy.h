// The loss of a language model from its last hidden vectors, differentiable.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "efla/base/ignore_index.h"

namespace efla::autograd {

// Returns the mean over n with targets[n] ≠ kIgnoreIndex of −log softmax(weight x[n])[targets[n]], or 0 without any. x
// [N, D], weight [V, D], targets [N] int64; a float32 scalar. The logits are computed in slices of rows, and their
// gradient with them in the forward: no [N, V] tensor is ever held. Throws Error naming the tensor; targets out of
// range too.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets);

}  // namespace efla::autograd
