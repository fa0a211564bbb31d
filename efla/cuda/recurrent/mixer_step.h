// A mixer's part of a decode step in one kernel (rule/mixer_step.h).
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "efla/rule/mixer_step.h"

namespace efla::gpu {

// For Hopper GPUs; in float32. Results have the same bits in every run. Two kernels add in different orders, one for
// few heads of all texts and one for many. So the bits of a text depend on the number of texts; with the same kernel
// they do not depend on the other texts.
//
// The kernel reads slots and parameters while the kernels before it still run, which must therefore not write them.
void mixer_step(const MixerStep& problem, cudaStream_t stream);

// The kernel of mixer_step for many heads.
void mixer_step_many(const MixerStep& problem, cudaStream_t stream);

// Returns what of the problem mixer_step does not take on the current device, as a sentence, or "".
std::string mixer_step_refusal(const MixerStep& problem);

}  // namespace efla::gpu
