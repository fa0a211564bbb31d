// The contract of the cross-entropy of a softmax over logits, and of its gradient, which is written over the logits.
// docs/ops/cross_entropy.md describes the operator.
#pragma once

#include <cstdint>

#include "efla/base/device.h"
#include "efla/base/dtype.h"
#include "efla/base/ignore_index.h"
#include "efla/base/view.h"

namespace efla {

// Row n counts unless targets(n) is kIgnoreIndex; the loss and the gradient of a row that does not count are 0.
//   loss(n) = log Σ_v e^{logits(n, v)} − logits(n, targets(n))
//   gradient(n, v) = share (softmax(logits(n))_v − [v = targets(n)])
// [v = targets(n)] is 1 if v is the target, otherwise 0. T is float or bfloat16. On a GPU the targets are not checked,
// and a target outside of [0, V) gives NaN.
template <class T>
struct CrossEntropy {
  View<T, 2> logits;                    // [N, V], V ≥ 1; overwritten by the gradient if `share` is present
  View<const std::int64_t, 1> targets;  // [N]
  View<const float, 1> share;           // [1], optional; the factor of a row's gradient
  View<float, 1> loss;                  // [N]
};

// Throws Error as validate of rule/validate.h does. Targets are checked only if they are in the CPU's memory.
template <class T>
void validate(const CrossEntropy<T>& problem, const Device& device = {});

}  // namespace efla
