// Decode steps whose states are in registers only. rule/problem.h has shapes and equations.
#pragma once

#include <cuda_runtime_api.h>

#include "efla/rule/problem.h"

namespace efla::gpu {

// Returns whether step_in_registers takes a problem and is faster than step.cu: four tokens or more, K is 64 or 128, V
// is a multiple of 64, and rows of states can be read in pieces of 16 bytes.
template <class T>
bool takes_step_in_registers(const DeltaSteps<T, float>& problem);

// Computes what step_fwd (delta.h) computes, to the same bits as step.cu.
template <class T>
void step_in_registers(const DeltaSteps<T, float>& problem, cudaStream_t stream);

}  // namespace efla::gpu
