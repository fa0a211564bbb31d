// An attention layer's part of a decode step in one kernel, on Hopper GPUs, and copies of keys and values to and from
// pages. rule/attention_step.h has shapes and equations, docs/ops/attention_step.md the limits. delta.h says what holds
// for every function.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "efla/cuda/delta.h"
#include "efla/rule/attention_step.h"

namespace efla::gpu {

// Computes the outputs in float32 and writes the new keys and values. It reads only the keys and values that there are.
// The tokens of a text are divided into parts by the number of the tokens alone, and the parts are added in their
// order, so that a text has the same bits for any other texts of the call and in every run. Takes problems for which
// attention_step_refusal returns "". Throws CudaError where the launch fails, and Error for a workspace that is too
// small.
//
// The kernel reads slots, positions, pages and weights while earlier kernels in the stream still run; these kernels
// must not write them.
template <class S>
void attention_step(const AttentionStep<S>& problem, const Workspace& workspace, cudaStream_t stream);

template <class S>
std::size_t attention_step_workspace_bytes(const AttentionStep<S>& problem);

// Returns what attention_step does not take of a problem on the current device, as a sentence, or "".
template <class S>
std::string attention_step_refusal(const AttentionStep<S>& problem);

// Copies keys and values. Throws CudaError where the launch fails.
template <class S>
void copy_pages(const PageCopy<S>& problem, cudaStream_t stream);

}  // namespace efla::gpu
