// The contract of a mixer's short convolution: depthwise, causal, without bias, followed by SiLU.
// docs/ops/short_conv.md describes the operator.
#pragma once

#include <cstdint>

#include "efla/base/device.h"
#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla {

inline constexpr std::int64_t kMaxConvWidth = 8;

// y[t, d] = silu(a[t, d]), a[t, d] = Σ_j weight[d, j] · x[t − (W−1) + j, d]; tokens before the first one of a sequence
// count as zero. y does not overlap x. W is in [1, kMaxConvWidth]. T is float or bfloat16.
template <class T>
struct ShortConvForward {
  View<const T, 3> x;           // [B, T, D]
  View<const float, 2> weight;  // [D, W], the last tap is the current token's
  View<T, 3> y;                 // [B, T, D]
  // [N + 1] if N sequences are packed into one batch entry: 0, the end of each sequence; absent: B sequences.
  View<const std::int64_t, 1> cu_seqlens = {};
};

// The gradients of a loss whose gradient with respect to y is dy. a is computed again. dx overlaps neither x nor dy.
template <class T>
struct ShortConvBackward {
  View<const T, 3> x;           // [B, T, D]
  View<const float, 2> weight;  // [D, W]
  View<const T, 3> dy;          // [B, T, D]
  View<T, 3> dx;                // [B, T, D]
  View<float, 2> dweight;       // [D, W], summed over all tokens
  View<const std::int64_t, 1> cu_seqlens = {};
};

// Throws Error as validate of rule/validate.h does.
template <class T>
void validate(const ShortConvForward<T>& problem, const Device& device = {});
template <class T>
void validate(const ShortConvBackward<T>& problem, const Device& device = {});

}  // namespace efla
