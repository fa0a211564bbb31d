// A linear layer without bias: validates a problem, chooses a row of the operation's list (implementation.h) and runs
// it.
#pragma once

#include <span>

#include "efla/ops/implementation.h"
#include "efla/rule/linear.h"

namespace efla {

// Each row of y has the same bits whatever other rows there are. For many rows the general product of a BLAS is faster.
// Throws Error for a bad argument or an implementation that refuses the problem.
Choice linear_forward(const LinearForward& problem, const RunOptions& options = {});

// Computes several problems, none of which reads what another writes, with the bits of a call for each. An
// implementation that refuses one of them computes none.
Choice linear_forward(std::span<const LinearForward> problems, const RunOptions& options = {});

// Returns whether an implementation takes the problem. Throws Error for a bad argument.
bool takes_linear_forward(const LinearForward& problem, const RunOptions& options = {});

}  // namespace efla
