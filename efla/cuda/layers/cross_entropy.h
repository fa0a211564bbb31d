// The cross-entropy of a softmax over logits, and its gradient, on NVIDIA GPUs. rule/cross_entropy.h has shapes, types
// and equations. delta.h says what holds for every function.
#pragma once

#include <cuda_runtime_api.h>

#include "efla/rule/cross_entropy.h"

namespace efla::gpu {

// Computes the losses and, if problem.share is given, the gradients, which overwrite the logits. The columns of a row
// are contiguous. T is float or bfloat16.
template <class T>
void cross_entropy(const CrossEntropy<T>& problem, cudaStream_t stream);

}  // namespace efla::gpu
