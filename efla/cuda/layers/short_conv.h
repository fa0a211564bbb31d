// The short convolution of a mixer, followed by SiLU, on NVIDIA GPUs. rule/short_conv.h has shapes, types and
// equations. delta.h says what holds for every function.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "efla/cuda/common/workspace.h"
#include "efla/rule/short_conv.h"

namespace efla::gpu {

// Computes the forward. Batch entries and tokens may have any stride, and channels are contiguous. Fastest for at most
// four taps if tokens can be read in pieces of 16 bytes. T is float or bfloat16.
template <class T>
void short_conv(const ShortConvForward<T>& problem, cudaStream_t stream);

// Computes the backward, for the same tensors. The sums over tokens are made of parts, which are added in a fixed
// order. The parts depend on the sizes and on whether tokens can be read in pieces of 16 bytes. Throws Error for a
// workspace that is too small.
template <class T>
void short_conv(const ShortConvBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that the backward needs.
template <class T>
std::size_t short_conv_workspace_bytes(const ShortConvBackward<T>& problem);

}  // namespace efla::gpu
