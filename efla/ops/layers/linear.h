// A linear layer without bias: validates a problem, chooses a row of the operation's list (implementation.h) and runs
// it. docs/ops/linear.md describes the operation.
#pragma once

#include <span>

#include "efla/ops/implementation.h"
#include "efla/rule/linear.h"

namespace efla {

// Computes y of rule/linear.h. A row of y has the same bits for any number of other rows: always on the CPU, for up to
// 8 rows on a GPU. For many rows the general product of a BLAS is faster. Throws Error for a bad argument or if no
// implementation takes the problem, and CudaError for failures on a GPU.
Choice linear_forward(const LinearForward& problem, const RunOptions& options = {});

// Computes several problems with the bits of one call per problem. No problem may read what another one writes. An
// implementation must take all of them.
Choice linear_forward(std::span<const LinearForward> problems, const RunOptions& options = {});

// Returns whether an implementation takes the problem. Throws Error for a bad argument.
bool takes_linear_forward(const LinearForward& problem, const RunOptions& options = {});

}  // namespace efla
