// The short convolution of a mixer with SIMD (docs/ops/short_conv.md).
#pragma once

#include "efla/base/threads.h"
#include "efla/rule/short_conv.h"

namespace efla::cpu {

// Compute the forward and the backward of rule/short_conv.h without cu_seqlens. Channels of x, y, dy and dx must be
// contiguous (stride 1). T is float or bfloat16; arithmetic is in float32. Work is divided by the shape alone, so that
// the bits are the same for any pool.
template <class T>
void short_conv(const ShortConvForward<T>& problem, ThreadPool& pool);
template <class T>
void short_conv(const ShortConvBackward<T>& problem, ThreadPool& pool);

}  // namespace efla::cpu
