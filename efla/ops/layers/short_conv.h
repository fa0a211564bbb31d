// The short convolution: validates a problem, chooses a row of the operation's list (implementation.h) and runs it.
// docs/ops/short_conv.md describes the operation.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/short_conv.h"

namespace efla {

// Compute the forward and the backward of rule/short_conv.h. T is float or bfloat16. Both throw Error for a bad
// argument or if no implementation takes the problem, and CudaError for failures on a GPU.
template <class T>
Choice short_conv_forward(const ShortConvForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice short_conv_backward(const ShortConvBackward<T>& problem, const RunOptions& options = {});

// Returns the list of the forward and of the backward, which have the same rows.
std::vector<ImplementationName> short_conv_implementations();

}  // namespace efla
