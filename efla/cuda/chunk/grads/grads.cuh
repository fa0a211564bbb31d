// What the kernels of the gradients have in common (grads_portable.cu, grads_channel_sm90.cu, grads_sm90.cu).
#pragma once

#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/grad_tail.cuh"
#include "efla/cuda/common/lane_sums.cuh"
#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

// Writes dv = b∘D of a slice, with D in the tile `d` and b in `gains`. Returns the thread's part of db. kThreads / 64
// neighbouring threads have one token.
template <int kThreads, class E>
__device__ __forceinline__ float value_gradients(const ChunkBackward<E>& c, const ChunkAt& at, int i_h, int slice,
                                                 const unsigned char* d, const float* gains, int thread) {
  constexpr int kRowThreads = kThreads / kChunkTokens, kPieces = 8 / kRowThreads;
  const int row = thread / kRowThreads;
  if (row >= at.rows) return 0;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = kPieces * (thread % kRowThreads) + i;
    const int column = 64 * slice + 8 * piece, count = min(static_cast<int>(c.p.shape.value_dim) - column, 8);
    if (count <= 0) break;
    const E* from = c.p.v.at(at.i_b, at.start + row, i_h, column);
    uint4 v{0, 0, 0, 0};
    if (c.v_rows) {
      v = *reinterpret_cast<const uint4*>(from);
    } else {
      std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < count) words[j / 2] |= static_cast<std::uint32_t>(from[j * c.p.v.stride[3]].bits) << (16 * (j % 2));
      }
      v = uint4{words[0], words[1], words[2], words[3]};
    }
    const uint4 of_d = *reinterpret_cast<const uint4*>(d + piece_offset(row, piece));
    const std::uint32_t values[4] = {v.x, v.y, v.z, v.w}, words[4] = {of_d.x, of_d.y, of_d.z, of_d.w};
    std::uint32_t dv[4];
    const float b = gains[row];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum += low_of<E>(values[j]) * low_of<E>(words[j]) + high_of<E>(values[j]) * high_of<E>(words[j]);
      dv[j] = pack<E>(b * low_of<E>(words[j]), b * high_of<E>(words[j]));
    }
    store_row_piece<E>(c.p.dv.at(at.i_b, at.start + row, i_h, column), c.p.dv.stride[3],
                       uint4{dv[0], dv[1], dv[2], dv[3]}, count, c.v_rows);
  }
  return sum;
}

}  // namespace efla::gpu
