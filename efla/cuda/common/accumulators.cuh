// The accumulators of mma and wgmma. A warp has 16 rows: elements 4·j + 2·r + e of a lane are row lane/4 + 8·r, column
// 8·j + 2·(lane % 4) + e.
#pragma once

namespace efla::gpu {

// Multiplies column j of x by factors[j], which is in shared memory.
template <int kCount>
__device__ __forceinline__ void scale_columns(float (&x)[kCount], const float* factors, int lane) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * i + 2 * (lane % 4));
    x[4 * i] *= factor.x;
    x[4 * i + 1] *= factor.y;
    x[4 * i + 2] *= factor.x;
    x[4 * i + 3] *= factor.y;
  }
}

// Multiplies both rows of a lane by a factor each.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&x)[kCount], float2 factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
}

}  // namespace efla::gpu
