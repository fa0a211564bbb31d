// What the kernels for a gate per key channel share (prepare_channel.cu, grads_channel_sm90.cu): a chunk is cut
// into blocks of 16 tokens.
#pragma once

#include "efla/cuda/chunk/prepare/prepare.cuh"
#include "efla/cuda/common/lane_sums.cuh"

namespace efla::gpu {

inline constexpr int kBlock = 16, kBlocks = kChunkTokens / kBlock;

// Whether rows of keys and queries of type E are brought to a length near 1 by powers of two, one per token, before
// they are decayed: float16 has too few exponents for decays of short and of long rows. The factors n_k and n_q of the
// tokens are divided by these powers.
template <class E>
inline constexpr bool kUnitRows = std::is_same_v<E, float16>;

// Returns the power of two that brings a row with this sum of squares to a length in [1, 2). Rows shorter than √ε (with
// the L2 norm) or 2⁻⁶ (without) stay shorter than 1, to bound the factors that are divided by the power.
__device__ __forceinline__ float unit_of(float squares, bool qk_l2norm) {
  const float x = squares + (qk_l2norm ? static_cast<float>(kL2NormEpsilon) : 0x1p-12F);
  const int exponent = static_cast<int>(__float_as_uint(x) >> 23 & 255U) - 127;
  return __int_as_float((127 - (exponent >> 1)) << 23);
}

// Returns 1/x of a power of two.
__device__ __forceinline__ float inverse_of_power(float x) { return __int_as_float((254 << 23) - __float_as_int(x)); }

// Returns the log2 of a token's decay.
__device__ __forceinline__ float limited_gate(float g) { return (g < kMinDecay ? kMinDecay : g) * 1.44269504F; }

}  // namespace efla::gpu
