// The decay gate: validates a problem, chooses a row of the operation's list (implementation.h) and runs it.
#pragma once

#include "efla/ops/implementation.h"
#include "efla/rule/decay_gate.h"

namespace efla {

// T: float or bfloat16. Both throw Error for a bad argument or an implementation that refuses the problem.
template <class T>
Choice decay_gate_forward(const DecayGateForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice decay_gate_backward(const DecayGateBackward<T>& problem, const RunOptions& options = {});

}  // namespace efla
