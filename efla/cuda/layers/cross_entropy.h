// The cross-entropy of a softmax (rule/cross_entropy.h) on NVIDIA GPUs; delta.h says what holds for every function.
#pragma once

#include "efla/cuda/delta.h"
#include "efla/rule/cross_entropy.h"

namespace efla::gpu {

// The columns of a row are side by side in memory. T is float or bfloat16.
template <class T>
void cross_entropy(const CrossEntropy<T>& problem, cudaStream_t stream);

}  // namespace efla::gpu
