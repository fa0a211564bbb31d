// Gated linear units on NVIDIA GPUs, y = act(gate) · up. rule/glu.h has shapes, types and equations. delta.h says what
// holds for every function.
#pragma once

#include <cuda_runtime_api.h>

#include "efla/rule/glu.h"

namespace efla::gpu {

// Compute the forward and the backward. The columns of a row are contiguous. T is float or bfloat16.
template <class T>
void glu(const GluForward<T>& problem, cudaStream_t stream);
template <class T>
void glu(const GluBackward<T>& problem, cudaStream_t stream);

}  // namespace efla::gpu
