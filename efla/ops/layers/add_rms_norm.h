// The step between two branches of a residual network: validates a problem, chooses a row of the operation's list
// (implementation.h) and runs it.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/add_rms_norm.h"

namespace efla {

// T: float or bfloat16. Both throw Error for a bad argument or an implementation that refuses the problem.
template <class T>
Choice add_rms_norm_forward(const AddRmsNormForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice add_rms_norm_backward(const AddRmsNormBackward<T>& problem, const RunOptions& options = {});

}  // namespace efla
