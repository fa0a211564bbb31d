// Sums over the lanes of a warp.
#pragma once

namespace efla::gpu {

// Returns the sum over kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

// Leaves in x[0] the sum of element lane % (2 · kHalf) over the 2 · kHalf lanes of an aligned group. In every step two
// lanes exchange sums: each keeps half of the elements and gives the other half to the other lane.
template <int kHalf, int kCount>
__device__ __forceinline__ void sum_halves_over_lanes(float (&x)[kCount], int lane) {
  const bool upper = (lane & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float mine = upper ? x[i + kHalf] : x[i], other = upper ? x[i] : x[i + kHalf];
    x[i] = mine + __shfl_xor_sync(0xffffffffU, other, kHalf);
  }
  if constexpr (kHalf > 1) sum_halves_over_lanes<kHalf / 2>(x, lane);
}
// Leaves in x[0] the sum of element lane % kCount over all lanes.
template <int kCount>
__device__ __forceinline__ void sum_over_lanes(float (&x)[kCount], int lane) {
  sum_halves_over_lanes<kCount / 2>(x, lane);
#pragma unroll
  for (int offset = kCount; offset < 32; offset *= 2) x[0] += __shfl_xor_sync(0xffffffffU, x[0], offset);
}

}  // namespace efla::gpu
