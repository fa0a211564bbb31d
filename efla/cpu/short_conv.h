// The short convolution of a mixer: depthwise, causal, without bias, followed by SiLU.
#pragma once

#include <cstdint>

#include "efla/base/dtype.h"
#include "efla/base/threads.h"
#include "efla/base/view.h"

namespace efla::cpu {

inline constexpr std::int64_t kMaxConvWidth = 8;

// y[t, d] = silu(a[t, d]), a[t, d] = Σ_j weight[d, j] · x[t − (W−1) + j, d]; tokens before the first count as zero.
// Channels are contiguous in x and y (stride 1); y does not overlap x. W in [1, kMaxConvWidth].
template <class T>
struct ShortConvForward {
  View<const T, 3> x;           // [B, T, D]
  View<const float, 2> weight;  // [D, W], the last tap is the current token's
  View<T, 3> y;                 // [B, T, D]
};

// The gradients of a loss; dy is its gradient with respect to y. a is computed again. Channels are contiguous in x, dy
// and dx; dx overlaps neither of the others.
template <class T>
struct ShortConvBackward {
  View<const T, 3> x;           // [B, T, D]
  View<const float, 2> weight;  // [D, W]
  View<const T, 3> dy;          // [B, T, D]
  View<T, 3> dx;                // [B, T, D]
  View<float, 2> dweight;       // [D, W]
};

// T: float or bfloat16 (arithmetic in float32). The work is split by shape only: the same bits for any pool.
template <class T>
void short_conv(const ShortConvForward<T>& problem, ThreadPool& pool);
template <class T>
void short_conv(const ShortConvBackward<T>& problem, ThreadPool& pool);

}  // namespace efla::cpu
