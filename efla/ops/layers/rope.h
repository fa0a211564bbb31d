// Rotary position embeddings: validates a problem, chooses a row of the operation's list (implementation.h) and runs
// it. docs/ops/rope.md describes the operation.
#pragma once

#include "efla/ops/implementation.h"
#include "efla/rule/rope.h"

namespace efla {

// Computes y of rule/rope.h. Throws Error for a bad argument or if no implementation takes the problem.
Choice rope_forward(const RopeForward& problem, const RunOptions& options = {});

}  // namespace efla
