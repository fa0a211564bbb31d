// The cross-entropy of a softmax: validates a problem, chooses a row of the operation's list (implementation.h) and
// runs it.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/cross_entropy.h"

namespace efla {

// T: float or bfloat16. Throws Error for a bad argument or an implementation that refuses the problem.
template <class T>
Choice cross_entropy(const CrossEntropy<T>& problem, const RunOptions& options = {});

}  // namespace efla
