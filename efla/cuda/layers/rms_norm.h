// RMS normalisation on NVIDIA GPUs, y = x · r · weight · act(gate). rule/rms_norm.h has shapes, types and equations.
// delta.h says what holds for every function.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "efla/cuda/common/workspace.h"
#include "efla/rule/rms_norm.h"

namespace efla::gpu {

// Computes the forward. Rows may have any stride, and columns are contiguous, at most kMaxNormColumns. Fastest if rows
// can be read in pieces of 16 bytes. Throws Error for more columns. T is float or bfloat16.
template <class T>
void rms_norm(const RmsNormForward<T>& problem, cudaStream_t stream);

// Computes the backward, for the same rows. The sums over rows are made of parts, which are added in a fixed order. The
// parts depend on the sizes and on whether rows can be read in pieces of 16 bytes. Throws Error for more columns or a
// workspace that is too small.
template <class T>
void rms_norm(const RmsNormBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that the backward needs.
template <class T>
std::size_t rms_norm_workspace_bytes(const RmsNormBackward<T>& problem);

inline constexpr std::int64_t kMaxNormColumns = 8192;

}  // namespace efla::gpu
