// Decode steps whose states pass through registers alone.
#pragma once

#include <cuda_runtime_api.h>

#include "efla/rule/problem.h"

namespace efla::gpu {

// Returns whether step_in_registers takes a problem: K is 64 or 128, V a multiple of 64, rows of states are aligned.
template <class T>
bool takes_step_in_registers(const DeltaSteps<T, float>& problem);

// As step_fwd.
template <class T>
void step_in_registers(const DeltaSteps<T, float>& problem, cudaStream_t stream);

}  // namespace efla::gpu
