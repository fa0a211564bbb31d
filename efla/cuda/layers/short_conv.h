// The short convolution (rule/short_conv.h) on NVIDIA GPUs; delta.h says what holds for every function.
#pragma once

#include "efla/cuda/delta.h"
#include "efla/rule/short_conv.h"

namespace efla::gpu {

// Any strides of batch entries and tokens; channels side by side. Fastest for at most four taps where tokens can be
// read in pieces of 16 bytes. T is float or bfloat16.
template <class T>
void short_conv(const ShortConvForward<T>& problem, cudaStream_t stream);

// The sums over tokens are made of parts that depend on the problem's sizes alone and are added in a fixed order.
template <class T>
void short_conv(const ShortConvBackward<T>& problem, const Workspace& workspace, cudaStream_t stream);

// Returns the bytes of workspace that the backward needs.
template <class T>
std::size_t short_conv_workspace_bytes(const ShortConvBackward<T>& problem);

}  // namespace efla::gpu
