// The decay gate on NVIDIA GPUs. rule/decay_gate.h has shapes, types and equations. delta.h says what holds for every
// function.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "efla/cuda/common/workspace.h"
#include "efla/rule/decay_gate.h"

namespace efla::gpu {

// Computes the forward. Rows may have any stride, and columns are contiguous. Fastest if rows can be read in pieces of
// 16 bytes. T is float or bfloat16.
template <class T>
void decay_gate(const DecayGateForward<T>& problem, cudaStream_t stream);

// Computes the backward, for the same rows. Sums over rows are made of parts, which are added in a fixed order. The
// parts depend on the sizes and on whether rows can be read in pieces of 16 bytes. Throws Error for a workspace that is
// too small.
template <class T>
void decay_gate(const DecayGateBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that the backward needs.
template <class T>
std::size_t decay_gate_workspace_bytes(const DecayGateBackward<T>& problem);

}  // namespace efla::gpu
