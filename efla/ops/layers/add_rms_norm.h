// The step between two branches of a residual network: validates a problem, chooses a row of the operation's list
// (implementation.h) and runs it. docs/ops/add_rms_norm.md describes the operation.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/add_rms_norm.h"

namespace efla {

// Compute the forward and the backward of rule/add_rms_norm.h. T is float or bfloat16. On the CPU only "ref" takes
// them, by name. Both throw Error for a bad argument or if no implementation takes the problem, and CudaError for
// failures on a GPU.
template <class T>
Choice add_rms_norm_forward(const AddRmsNormForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice add_rms_norm_backward(const AddRmsNormBackward<T>& problem, const RunOptions& options = {});

}  // namespace efla
