// How the kernels of linear layers cut their work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "efla/base/view.h"
#include "efla/rule/linear.h"

namespace efla::cpu {

// Greatest number of rows of x that are computed together with a few rows of the weight, so that the weight is read
// from memory once.
inline constexpr int kPassRows = 8;

// Least number of bytes between the elements of a weight that a tile reads and the elements that the tile prefetches;
// twice as many if two tiles read the same rows of the weight.
inline constexpr std::int64_t kPrefetchBytes = 8192;

// Least number of bytes of the weights of a call for which few rows of x go through one row of the weight after
// another. The processor prefetches such weights from memory faster than several rows at a time. With fewer bytes they
// are often in a cache, where several rows at a time are faster.
inline constexpr std::int64_t kStreamBytes = 1 << 20;

// Greatest number of bytes of a row of x for which many rows of x go through all rows of a block, so that the rows of x
// of a tile stay in the first-level cache. Meanwhile the sums of the tiles are kept in memory. A multiple of
// kScaleBlock elements.
inline constexpr std::int64_t kPassBytes = 4096;

// Greatest number of rows of the weight in a task whose sums are kept.
inline constexpr std::int64_t kPassOutputs = 48;

// The outputs of one task: rows [m_begin, m_end) of x by rows [n_begin, n_end) of the weight.
struct LinearBlock {
  std::int64_t m_begin, m_end, n_begin, n_end;
};

// The rows of a product. X: float, or bfloat16 if the rows of x are rounded.
template <class X>
struct LinearRows {
  View<const X, 2> x;
  View<float, 2> y;
};

// Returns how many rows of a quantised weight are written before they are multiplied: two tiles of rows if there are
// few rows of x, so that they stay in the first-level cache, otherwise all rows of the block.
inline std::int64_t room_for(const LinearBlock& block) {
  constexpr std::int64_t kFewOutputs = 12;
  const std::int64_t outputs = block.n_end - block.n_begin;
  return block.m_end - block.m_begin <= kPassRows ? std::min(kFewOutputs, outputs) : outputs;
}

}  // namespace efla::cpu
