// Gated linear units: validates a problem, chooses a row of the operation's list (implementation.h) and runs it.
// docs/ops/glu.md describes the operation.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/glu.h"

namespace efla {

// Compute the forward and the backward of rule/glu.h. T is float or bfloat16. On the CPU "auto" takes the forward in
// float32; only "ref" takes the rest, by name. Both throw Error for a bad argument or if no implementation takes the
// problem, and CudaError for failures on a GPU.
template <class T>
Choice glu_forward(const GluForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice glu_backward(const GluBackward<T>& problem, const RunOptions& options = {});

}  // namespace efla
