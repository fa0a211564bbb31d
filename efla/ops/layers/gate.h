// The gated product of an MLP: validates a problem, chooses a row of the operation's list (implementation.h) and runs
// it.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/gate.h"

namespace efla {

// Throws Error for a bad argument or an implementation that refuses the problem.
Choice gate_forward(const GateForward& problem, const RunOptions& options = {});

// Returns the list, in the order in which "auto" asks its rows.
std::vector<ImplementationName> gate_implementations();

}  // namespace efla
