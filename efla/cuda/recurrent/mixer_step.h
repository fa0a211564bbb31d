// A mixer's part of a decode step in one kernel, on Hopper GPUs: short convolution, activations, delta rule, output
// norm and output gate of one token per text. rule/mixer_step.h has shapes and equations, docs/ops/mixer_step.md the
// limits.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "efla/rule/mixer_step.h"

namespace efla::gpu {

// Computes the outputs in float32 and updates history and states. Two kernels add in different orders: one for few
// heads over all texts, if 8 · B · H thread blocks fit the multiprocessors at once, and one for many. So the bits of a
// text may depend on the number of texts and on the GPU. With the same kernel they do not depend on the other texts.
// Results have the same bits in every run. Takes problems for which mixer_step_refusal returns "". Throws CudaError
// where the launch fails.
//
// The kernels read slots and parameters while earlier kernels in the stream still run; these kernels must not write
// them.
void mixer_step(const MixerStep& problem, cudaStream_t stream);

// Launches the kernel of mixer_step for many heads.
void mixer_step_many(const MixerStep& problem, cudaStream_t stream);

// Returns what mixer_step does not take of a problem on the current device, as a sentence, or "".
std::string mixer_step_refusal(const MixerStep& problem);

}  // namespace efla::gpu
