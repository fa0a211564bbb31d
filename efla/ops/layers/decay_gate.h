// The decay gate: validates a problem, chooses a row of the operation's list (implementation.h) and runs it.
// docs/ops/decay_gate.md describes the operation.
#pragma once

#include "efla/ops/implementation.h"
#include "efla/rule/decay_gate.h"

namespace efla {

// Compute the forward and the backward of rule/decay_gate.h. T is float or bfloat16. On the CPU only "ref" takes them,
// by name. Both throw Error for a bad argument or if no implementation takes the problem, and CudaError for failures on
// a GPU.
template <class T>
Choice decay_gate_forward(const DecayGateForward<T>& problem, const RunOptions& options = {});
template <class T>
Choice decay_gate_backward(const DecayGateBackward<T>& problem, const RunOptions& options = {});

}  // namespace efla
