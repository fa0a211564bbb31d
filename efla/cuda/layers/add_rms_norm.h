// The step between two branches of a residual network on NVIDIA GPUs: sum = x + branch, y = rms_norm(sum) · weight.
// rule/add_rms_norm.h has shapes, types and equations. delta.h says what holds for every function.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "efla/cuda/common/workspace.h"
#include "efla/rule/add_rms_norm.h"

namespace efla::gpu {

// Compute the forward and the backward. Rows may have any stride, and columns are contiguous, at most kMaxNormColumns
// (rms_norm.h). Sums over rows as in rms_norm.h. Throw Error for more columns or a workspace that is too small. T is
// float or bfloat16.
template <class T>
void add_rms_norm(const AddRmsNormForward<T>& problem, cudaStream_t stream);
template <class T>
void add_rms_norm(const AddRmsNormBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that the backward needs.
template <class T>
std::size_t add_rms_norm_workspace_bytes(const AddRmsNormBackward<T>& problem);

}  // namespace efla::gpu
