// SwiGLU: validates a problem, chooses a row of the operation's list (implementation.h) and runs it.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/swiglu.h"

namespace efla {

// T: float or bfloat16. Both throw Error for a bad argument or an implementation that refuses the problem.
template <class T>
Choice swiglu_forward(const SwigluForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice swiglu_backward(const SwigluBackward<T>& problem, const RunOptions& options = {});

// Returns the list of the forward and of the backward, which have the same rows. On the CPU only ref computes them.
std::vector<ImplementationName> swiglu_implementations();

}  // namespace efla
