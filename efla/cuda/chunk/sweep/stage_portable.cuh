// What a thread block of a portable sweep reads of a chunk (forward_portable.cu, backward_portable.cu).
#pragma once

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/chunk/state.cuh"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

inline constexpr int kSweepThreads = 128;

// What the products of a chunk read: keys, queries if kQueries is set, and values or dO, which the results replace.
// With a gate per key channel k, w, q and decay are the ScaledRows of the chunk.
template <int kTiles, bool kQueries, bool kChannel>
struct Stage {
  alignas(1024) unsigned char k[kTiles * kTileBytes];
  unsigned char w[kChannel ? kTiles * kTileBytes : 0];
  unsigned char q[kQueries ? kTiles * kTileBytes : 1024];
  unsigned char v[kTileBytes];
  ChunkRecord record;
  alignas(16) float decay[kChannel ? 64 * kTiles : 0];

  __device__ const unsigned char* written() const { return kChannel ? w : k; }
};

// Starts and commits the copies of a chunk's rows and record to a stage. p has the keys and queries, `values` are v or
// dO, with rows in pieces of 16 bytes if `aligned` is set, and `column` is the slice's first value column.
template <int kTiles, bool kQueries, bool kChannel, class Problem, class E>
__device__ __forceinline__ void start_loads(const ChunkProblem<E>& c, const Problem& p, const View<const E, 4>& values,
                                            bool aligned, const ChunkAt& at, std::int64_t slot, std::int64_t i_h,
                                            std::int64_t column, Stage<kTiles, kQueries, kChannel>& stage) {
  const std::int64_t i_q = i_h / p.shape.group();
  const int thread = threadIdx.x;
  if constexpr (kChannel) {
    const auto& from = reinterpret_cast<const ScaledRows<kTiles>*>(c.scaled)[slot * p.shape.value_heads + i_h];
    load_image<kSweepThreads>(stage.k, from.k, (kQueries ? 3 : 2) * kTiles * kTileBytes, thread);
    load_image<kSweepThreads>(stage.decay, from.decay, sizeof(stage.decay), thread);
  } else {
    load_rows<kTiles, kSweepThreads>(stage.k, p.k, at.i_b, at.start, at.rows, i_q, 0, c.k_rows, thread);
    if constexpr (kQueries) {
      load_rows<kTiles, kSweepThreads>(stage.q, p.q, at.i_b, at.start, at.rows, i_q, 0, c.q_rows, thread);
    }
  }
  load_rows<1, kSweepThreads>(stage.v, values, at.i_b, at.start, at.rows, i_h, column, aligned, thread);
  load_image<kSweepThreads>(&stage.record, &c.records[slot * p.shape.value_heads + i_h], sizeof(ChunkRecord), thread);
  copy_async_commit();
}

// Multiplies the state by the decay of the chunk: with a gate per key channel, column j of s by the decay of key j.
template <int kTiles, bool kQueries, bool kChannel>
__device__ __forceinline__ void decay_state(float (&s)[32 * kTiles], const Stage<kTiles, kQueries, kChannel>& stage,
                                            int lane) {
  if constexpr (kChannel) {
    scale_columns(s, stage.decay, lane);
  } else {
#pragma unroll
    for (float& x : s) x *= stage.record.decay;
  }
}

}  // namespace efla::gpu
