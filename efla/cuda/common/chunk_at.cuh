// Where a chunk lies in the tokens.
#pragma once

#include <cstdint>

namespace efla::gpu {

// Where a chunk lies: sequence n of batch entry i_b with tokens [begin, end), the chunk's first token and its number of
// tokens, which is 0 if the slot has no chunk.
struct ChunkAt {
  std::int64_t n, i_b, begin, end, start;
  int rows;
};

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

}  // namespace efla::gpu
