// The decay gate (rule/decay_gate.h) on NVIDIA GPUs; delta.h says what holds for every function.
#pragma once

#include "efla/cuda/delta.h"
#include "efla/rule/decay_gate.h"

namespace efla::gpu {

// Any row strides; columns side by side. Fastest where rows can be read in pieces of 16 bytes. T is float or bfloat16.
template <class T>
void decay_gate(const DecayGateForward<T>& problem, cudaStream_t stream);

// The sums over rows are made of parts that depend on the problem's sizes and on whether rows are pieces of 16 bytes,
// and are added in a fixed order.
template <class T>
void decay_gate(const DecayGateBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that the backward needs.
template <class T>
std::size_t decay_gate_workspace_bytes(const DecayGateBackward<T>& problem);

}  // namespace efla::gpu
