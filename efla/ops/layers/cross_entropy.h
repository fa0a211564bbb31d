// The cross-entropy of a softmax: validates a problem, chooses a row of the operation's list (implementation.h) and
// runs it. docs/ops/cross_entropy.md describes the operation.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/cross_entropy.h"

namespace efla {

// Computes the losses and, with a share, the gradient of rule/cross_entropy.h. T is float or bfloat16. On the CPU only
// "ref" takes it, by name. Throws Error for a bad argument or if no implementation takes the problem, and CudaError for
// failures on a GPU.
template <class T>
Choice cross_entropy(const CrossEntropy<T>& problem, const RunOptions& options = {});

}  // namespace efla
