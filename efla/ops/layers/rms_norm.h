// RMS normalisation: validates a problem, chooses a row of the operation's list (implementation.h) and runs it.
// docs/ops/rms_norm.md describes the operation.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/rms_norm.h"

namespace efla {

// Compute the forward and the backward of rule/rms_norm.h. T is float or bfloat16. Both throw Error for a bad argument
// or if no implementation takes the problem, and CudaError for failures on a GPU.
template <class T>
Choice rms_norm_forward(const RmsNormForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice rms_norm_backward(const RmsNormBackward<T>& problem, const RunOptions& options = {});

// Returns the list of the forward and of the backward, which have the same rows.
std::vector<ImplementationName> rms_norm_implementations();

}  // namespace efla
