// Gated linear units: validates a problem, chooses a row of the operation's list (implementation.h) and runs it.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/glu.h"

namespace efla {

// T: float or bfloat16. Both throw Error for a bad argument or an implementation that refuses the problem.
template <class T>
Choice glu_forward(const GluForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice glu_backward(const GluBackward<T>& problem, const RunOptions& options = {});

}  // namespace efla
