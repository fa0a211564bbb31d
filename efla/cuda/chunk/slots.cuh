// The chunks of slots (chunk.h).
#pragma once

#include <cstdint>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/ptx.cuh"

namespace efla::gpu {

// Returns the slot of the first chunk of a sequence.
template <class E>
__device__ __forceinline__ std::int64_t first_slot(const ChunkProblem<E>& c, std::int64_t n) {
  return c.slots_per_sequence > 0 ? n * c.slots_per_sequence : c.p.cu_seqlens(n) / kChunkTokens + n;
}

// Returns the sequence to which a slot belongs. All lanes of a warp take part.
template <class E>
__device__ inline std::int64_t sequence_of_slot(const ChunkProblem<E>& c, std::int64_t slot) {
  if (c.slots_per_sequence > 0) return slot / c.slots_per_sequence;
  return find_sequence(c.p.shape.packed, slot, [&](std::int64_t n) { return first_slot(c, n); });
}

// Returns where the chunk of a slot lies. All lanes of a warp take part.
template <class E>
__device__ inline ChunkAt chunk_at(const ChunkProblem<E>& c, std::int64_t slot) {
  const std::int64_t n = sequence_of_slot(c, slot);
  const Sequence s = sequence_of(c.p, n);
  const std::int64_t start = s.begin + (slot - first_slot(c, n)) * kChunkTokens;
  return {n,     s.i_b, s.begin,
          s.end, start, static_cast<int>(max(std::int64_t{0}, min(s.end - start, std::int64_t{kChunkTokens})))};
}

}  // namespace efla::gpu
