// RMS normalisation (rule/rms_norm.h) on NVIDIA GPUs; delta.h says what holds for every function.
#pragma once

#include "efla/cuda/delta.h"
#include "efla/rule/rms_norm.h"

namespace efla::gpu {

// Any row strides; columns side by side, at most kMaxNormColumns of them. Fastest where rows can be read in pieces of
// 16 bytes. T is float or bfloat16.
template <class T>
void rms_norm(const RmsNormForward<T>& problem, cudaStream_t stream);

// The sums over rows are made of parts that depend on the problem's sizes alone and are added in a fixed order.
template <class T>
void rms_norm(const RmsNormBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that the backward needs.
template <class T>
std::size_t rms_norm_workspace_bytes(const RmsNormBackward<T>& problem);

inline constexpr std::int64_t kMaxNormColumns = 8192;

}  // namespace efla::gpu
