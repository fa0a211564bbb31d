// The short convolution of a mixer with SIMD.
#pragma once

#include "efla/base/threads.h"
#include "efla/rule/short_conv.h"

namespace efla::cpu {

// Computes a problem without cu_seqlens. Channels of x, y, dy and dx are contiguous (stride 1). T: float or bfloat16
// (arithmetic in float32). Work is split by shape alone: the same bits for any pool.
template <class T>
void short_conv(const ShortConvForward<T>& problem, ThreadPool& pool);
template <class T>
void short_conv(const ShortConvBackward<T>& problem, ThreadPool& pool);

}  // namespace efla::cpu
