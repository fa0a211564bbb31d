// Walks of segments that begin from zeros, a few chunks before their segment, where the decays have erased the state
// before (docs/design/2026-11-cuda-truncation.md has the theorem).
//
// The map of a token multiplies the norm of a state by at most the decay, if no I − a k kᵀ has a norm above 1. So a
// walk that begins from zeros lacks at most P times the state before it, with P the product over its warm-up: the
// chunks before the segment, of which it computes no outputs. `prepare` says what every chunk contributes to P.
//
// The launch of the maps walks such segments of a head with outputs instead, if P is at most kForgotten before every
// one. The walks store the largest values of the states before and after every warm-up. The second launch compares
// them: a walk ends at once if what was left out is below half a unit in the last place of float32, relative to the
// state at the segment's start, in every column. Otherwise it computes its segment again, from the sequence's start.
#pragma once

#include "efla/cuda/chunk/sweep/walk_sm90.cuh"
#include "efla/cuda/common/heuristics.h"

namespace efla::gpu {

// A bound of the product of norms from which a walk may begin from zeros. It is below kNegligible, so that the
// comparison afterwards succeeds although a state after a warm-up is smaller than the state before it.
inline constexpr float kForgotten = 0x1p-36F;

// What may be left out of a state, relative to it.
inline constexpr float kNegligible = 0x1p-25F;

// An upper bound of the ratio of a column's norm in 16 columns to the largest element: √(16 · 128).
inline constexpr float kNormOfPeak = 46;

// The warm-ups of the segments from the second on of a sequence and head.
struct WarmUps {
  int chunks[kMostSegments - 1];   // 0: the state is not forgotten
  float bound[kMostSegments - 1];  // of the product of norms
};

// Returns an upper bound of the norm of the map of a chunk, rounding included.
__device__ __forceinline__ float norm_bound(const ChunkRecord& record) {
  float bound = fmaxf(record.decay, 0x1p-126F) * (1 + 0x1p-12F);
#pragma unroll
  for (const float growth : record.growth) bound *= growth;
  return bound;
}

// Returns the warm-ups of segments of `length` chunks of the head whose record of chunk 0 is `records`, of
// `value_heads` heads. Run by one warp.
__device__ __forceinline__ WarmUps warm_ups(const ChunkRecord* records, std::int64_t value_heads, std::int64_t length,
                                            int segments, int lane) {
  WarmUps found;
  float bounds[kMostSegments - 1];
#pragma unroll
  for (int i = 0; i < kMostSegments - 1; ++i) {  // all loads before the first use
    const bool exists = i + 1 < segments && lane < length;
    const float bound = norm_bound(records[exists ? ((i + 1) * length - 1 - lane) * value_heads : 0]);
    bounds[i] = exists ? bound : 1.0F;
  }
#pragma unroll
  for (int i = 0; i < kMostSegments - 1; ++i) {
    float bound = bounds[i];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffffU, bound, offset);
      if (lane >= offset) bound *= other;
    }
    const unsigned forgotten = __ballot_sync(0xffffffffU, bound <= kForgotten && lane < length);
    found.chunks[i] = __ffs(static_cast<int>(forgotten));
    found.bound[i] = __shfl_sync(0xffffffffU, bound, max(found.chunks[i] - 1, 0));
  }
  return found;
}

// Returns where the peaks of columns `column` to `column` + 15 around the warm-up of a segment are stored.
template <class E>
__device__ __forceinline__ Peaks* peaks_of(const ChunkProblem<E>& c, const Walk& walk, int segment,
                                           std::int64_t column) {
  const std::int64_t groups = (c.p.shape.value_dim + 15) / 16, head = walk.n * c.p.shape.value_heads + walk.i_h;
  return c.peaks + (head * (c.forgetting_segments - 1) + segment - 1) * groups + column / 16;
}

// Returns whether what the walks of the first launch left out of the columns of this walk may be left out. Run by one
// warp.
template <int kColumns, class E>
__device__ __forceinline__ bool may_leave_out(const ChunkProblem<E>& c, const Walk& walk, const WarmUps& warm_ups,
                                              int lane) {
  bool may = true;
  const std::int64_t column = walk.column + 16 * lane;
  if (lane < kColumns / 16 && column < c.p.shape.value_dim) {
#pragma unroll
    for (int i = 0; i < kMostSegments - 1; ++i) {
      if (i + 1 >= c.forgetting_segments) break;
      const Peaks peaks = *peaks_of(c, walk, i + 1, column);
      const float before = __uint_as_float(peaks.before), after = __uint_as_float(peaks.after);
      may = may && warm_ups.bound[i] * kNormOfPeak * before <= kNegligible * after;  // NaN is not negligible
    }
  }
  return __all_sync(0xffffffffU, may);
}

// Makes the walk begin `chunks` chunks before its segment, without outputs of those. `maps` as in Walk.
__device__ __forceinline__ void begin_before(Walk& walk, int chunks, int maps) {
  walk.warm_up = chunks;
  walk.maps = maps;
  walk.begin -= chunks * kChunkTokens;
  walk.slot -= chunks;
  walk.first_chunk -= chunks;
  walk.chunks += chunks;
  if (walk.tail >= 0) walk.tail += chunks;
}

// Changes the walk of a thread block of a head whose states are forgotten before every one of its
// c.forgetting_segments. In the first launch it becomes the walk of such a segment; in the second one that ends at once
// or computes its segment again. A walk that ends at once has −1 chunks. Run by one warp; `walk` is in shared memory.
//
// The first launch waits for `prepare` before it lets the second one begin. So the second launch reads the records
// without a wait, while the first one ends, and waits only for the peaks of a head whose states are forgotten.
template <int kGroups, bool kOutputs, class E>
__device__ __forceinline__ void truncate(const ChunkProblem<E>& c, Walk& walk, int lane) {
  if constexpr (!kOutputs) {
    wait_for_kernels();
    let_next_kernel_begin();
  }
  const Sequence sequence = sequence_of(c.p, walk.n);
  const int segments = c.forgetting_segments;
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunkTokens - 1) / kChunkTokens,
                     length = segment_chunks(chunks, segments), heads = c.p.shape.value_heads;
  if ((segments - 1) * length >= chunks) return;  // without a last segment
  const WarmUps found = warm_ups(c.records + first_slot(c, walk.n) * heads + walk.i_h, heads, length, segments, lane);
  bool forgotten = true;
#pragma unroll
  for (int i = 0; i < kMostSegments - 1; ++i) forgotten = forgotten && (i + 1 >= segments || found.chunks[i] > 0);
  if (!forgotten) return;
  if constexpr (kOutputs) {
    wait_for_kernels();
    const bool done = may_leave_out<64 * kGroups>(c, walk, found, lane);
    if (lane != 0) return;
    if (done) {
      walk.chunks = -1;
    } else if (walk.chunks == 0 && walk.segment == walk.segments - 1) {
      place(walk, c, 0, 1);  // a last segment without chunks, which writes the state after the sequence
    } else if (walk.chunks > 0) {
      begin_before(walk, walk.first_chunk, kFromInitial);
    }
  } else if (lane == 0) {
    const int slices = slices_of(c.p.shape.value_dim, 64),
              part = static_cast<int>(blockIdx.x % map_blocks(c, 64 * kGroups)), segment = part / slices;
    if (segment >= segments) {
      walk.chunks = -1;
      return;
    }
    walk.outputs = true;
    walk.map = false;
    walk.column = part % slices * 64;
    place(walk, c, segment, segments);
    int own = 0, next = 0;
#pragma unroll
    for (int i = 0; i < kMostSegments - 1; ++i) {
      if (i + 1 == segment) own = found.chunks[i];
      if (i == segment && i + 1 < segments) next = found.chunks[i];
    }
    if (segment > 0) begin_before(walk, own, kFromZeros);
    if (next > 0) walk.measured = walk.warm_up + static_cast<int>(length) - next;
  }
}

// Stores the peaks that this warp's 16 columns, from `column` on, have before chunk `chunk` of the walk, if they are
// asked for.
template <int kTiles, class E>
__device__ __forceinline__ void store_peaks(const float (&s)[32 * kTiles], const ChunkProblem<E>& c, const Walk& walk,
                                            int chunk, std::int64_t column, int lane) {
  const bool after = walk.maps == kFromZeros && chunk == walk.warm_up, before = chunk == walk.measured;
  if (!after && !before) return;
  unsigned peak = 0;
#pragma unroll
  for (const float x : s) peak = max(peak, __float_as_uint(fabsf(x)));
  peak = __reduce_max_sync(0xffffffffU, peak);
  if (lane != 0 || column >= c.p.shape.value_dim) return;
  if (after) peaks_of(c, walk, walk.segment, column)->after = peak;
  if (before) peaks_of(c, walk, walk.segment + 1, column)->before = peak;
}

}  // namespace efla::gpu
