// The step between two branches of a residual network (rule/add_rms_norm.h) on NVIDIA GPUs; delta.h says what holds for
// every function.
#pragma once

#include "efla/cuda/delta.h"
#include "efla/rule/add_rms_norm.h"

namespace efla::gpu {

// Strides, columns and sums as in rms_norm.h. T is float or bfloat16.
template <class T>
void add_rms_norm(const AddRmsNormForward<T>& problem, cudaStream_t stream);
template <class T>
void add_rms_norm(const AddRmsNormBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that the backward needs.
template <class T>
std::size_t add_rms_norm_workspace_bytes(const AddRmsNormBackward<T>& problem);

}  // namespace efla::gpu
