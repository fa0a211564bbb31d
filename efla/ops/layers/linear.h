// A linear layer without bias: validates a problem, chooses a row of the operation's list (implementation.h) and runs
// it.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/linear.h"

namespace efla {

// Each row of y has the same bits whatever other rows there are. For many rows the general product of a BLAS is faster.
// Throws Error for a bad argument or an implementation that refuses the problem.
Choice linear_forward(const LinearForward& problem, const RunOptions& options = {});

// Returns whether an implementation takes the problem. Throws Error for a bad argument.
bool takes_linear_forward(const LinearForward& problem, const RunOptions& options = {});

}  // namespace efla
