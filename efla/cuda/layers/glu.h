// Gated linear units (rule/glu.h) on NVIDIA GPUs; delta.h says what holds for every function.
#pragma once

#include "efla/cuda/delta.h"
#include "efla/rule/glu.h"

namespace efla::gpu {

// The columns of a row are side by side in memory. T is float or bfloat16.
template <class T>
void glu(const GluForward<T>& problem, cudaStream_t stream);
template <class T>
void glu(const GluBackward<T>& problem, cudaStream_t stream);

}  // namespace efla::gpu
