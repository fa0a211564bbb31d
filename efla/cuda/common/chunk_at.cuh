// Where a chunk lies in the tokens. A problem (ChunkProblem, Float32Problem) says in kTokens how many tokens a chunk
// has, and in slots_per_sequence how slots are numbered.
#pragma once

#include <cstdint>

#include "efla/rule/problem.h"

namespace efla::gpu {

// Where a chunk lies: sequence n of batch entry i_b with tokens [begin, end), the chunk's first token and its number of
// tokens, which is 0 if the slot has no chunk.
struct ChunkAt {
  std::int64_t n, i_b, begin, end, start;
  int rows;
};

// Returns where chunk number `chunk` of sequence n lies. kExists: the sequence has this chunk.
template <int kTokens, bool kExists = false>
__device__ __forceinline__ ChunkAt place_of(const Sequence& s, std::int64_t n, std::int64_t chunk) {
  const std::int64_t start = s.begin + chunk * kTokens, rows = min(s.end - start, std::int64_t{kTokens});
  return {n, s.i_b, s.begin, s.end, start, static_cast<int>(kExists ? rows : max(std::int64_t{0}, rows))};
}

// Returns the last of `sequences` sequences for which first(n), which increases with n, is at most `index`. All lanes
// of a warp take part.
template <class F>
__device__ __forceinline__ std::int64_t find_sequence(std::int64_t sequences, std::int64_t index, F&& first) {
  std::int64_t low = 0, high = sequences;  // first(low) ≤ index, and the answer is below high
  while (high - low > 1) {
    const std::int64_t step = (high - low + 31) / 32, n = low + static_cast<int>(threadIdx.x % 32) * step;
    const unsigned below = __ballot_sync(0xffffffffU, n < high && first(n) <= index);
    low += (__popc(below) - 1) * step;
    high = min(high, low + step);
  }
  return low;
}

// Returns the slot of the first chunk of a sequence.
template <class Problem>
__device__ __forceinline__ std::int64_t first_slot(const Problem& c, std::int64_t n) {
  return c.slots_per_sequence > 0 ? n * c.slots_per_sequence : c.p.cu_seqlens(n) / Problem::kTokens + n;
}

// Returns where the chunk of a slot lies. All lanes of a warp take part.
template <class Problem>
__device__ __forceinline__ ChunkAt chunk_at(const Problem& c, std::int64_t slot) {
  const std::int64_t n = c.slots_per_sequence > 0
                             ? slot / c.slots_per_sequence
                             : find_sequence(c.p.shape.packed, slot, [&](std::int64_t i) { return first_slot(c, i); });
  return place_of<Problem::kTokens>(sequence_of(c.p, n), n, slot - first_slot(c, n));
}

}  // namespace efla::gpu
