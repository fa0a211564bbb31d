// Keys and queries with a channel gate as operands of AMX. With c_r = d_0 … d_r over a chunk, K_read = K ⊙ c and Q_read
// = Q ⊙ c multiply the state before the chunk. If c stays within bounds in which nothing overflows or underflows, keys
// are divided by c, and with K_write = K ⊘ c
//
//   L = stril(K_read K_writeᵀ),   P = tril(Q_read K_writeᵀ),   S ← diag(c_last) (S + K_writeᵀ U)
//
// are matrix products, and each term is as exact as in any product. Otherwise L and P are computed as without AMX
// (chunk-inl.h), and K_write contains the keys times the decays to the end of the chunk. Included by the kernels that
// include amx/bf16_split-inl.h.
#pragma once

#include "efla/cpu/delta/amx/bf16_split-inl.h"
#include "efla/cpu/delta/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// The range of products of a chunk's decays by which keys may be divided; also for a scalar gate.
inline constexpr float kSmallestDivisor = 0x1p-60F, kLargestDivisor = 0x1p60F;

// Computes c in decay.prefix and its last row in decay.whole. Returns whether keys may be divided by c.
HWY_INLINE bool multiply_channels(std::int64_t tokens, const ChunkDecay& decay) {
  const FloatTag d;
  auto inside = hn::FirstN(d, kLanes);
  for (std::int64_t i = 0; i < decay.key_stride; i += kLanes) {
    FloatVec product = hn::Set(d, 1.0F);
    for (std::int64_t at = i; at < tokens * decay.key_stride; at += decay.key_stride) {
      product = hn::Mul(product, hn::Load(d, decay.token + at));
      inside = hn::And(inside, hn::Ge(product, hn::Set(d, kSmallestDivisor)));
      inside = hn::And(inside, hn::Le(product, hn::Set(d, kLargestDivisor)));
      hn::Store(product, d, decay.prefix + at);
    }
    hn::Store(product, d, decay.whole + i);
  }
  return hn::AllTrue(d, inside);
}

// Splits K ⊙ c and Q ⊙ c into `reads`, and K ⊘ c into `writes`.
template <int kKeySplits>
HWY_INLINE void split_divided_keys(std::int64_t tokens, const ChunkScratch& c, SplitTiles reads, SplitTiles writes) {
  const FloatTag d;
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t along = 0; along < reads.depth; ++along) {
      const std::int64_t i = r * c.key_stride + along * kTileDepth, j = i + kLanes;
      const FloatVec c0 = hn::Load(d, c.decay.prefix + i), c1 = hn::Load(d, c.decay.prefix + j);
      const FloatVec k0 = hn::Load(d, c.k + i), k1 = hn::Load(d, c.k + j);
      const FloatVec q0 = hn::Mul(hn::Load(d, c.q + i), c0), q1 = hn::Mul(hn::Load(d, c.q + j), c1);
      split_pairs<kKeySplits>(hn::Mul(k0, c0).raw, hn::Mul(k1, c1).raw, reads.row(r, along), reads.split_stride());
      split_pairs<kKeySplits>(q0.raw, q1.raw, reads.row(kChunk + r, along), reads.split_stride());
      split_pairs<kKeySplits>(hn::Div(k0, c0).raw, hn::Div(k1, c1).raw, writes.row(r, along), writes.split_stride());
    }
  }
}

// Writes K_read and below it Q_read to the left operand `reads`, and K_write to `writes`, with zeros after the last
// token. load_chunk must have filled q, k and the decays. Returns whether keys are divided by c; if not, computes P and
// L.
template <int kKeySplits>
HWY_INLINE bool split_decayed_keys(const ChunkPlace& at, std::int64_t key_dim, ChunkScratch& c, SplitTiles reads,
                                   SplitTiles writes) {
  const std::int64_t tokens = at.tokens;
  const bool divided = multiply_channels(tokens, c.decay);
  if (divided) {
    split_divided_keys<kKeySplits>(tokens, c, reads, writes);
  } else {
    std::fill_n(c.scores, 2 * kChunk * kChunk, 0.0F);
    compute_scores(at, key_dim, c);
    split_rows<kKeySplits>(c.k_read, c.key_stride, 0, tokens, reads);
    split_rows<kKeySplits>(c.q_read, c.key_stride, kChunk, tokens, reads);
    split_rows<kKeySplits>(c.k_write, c.key_stride, 0, tokens, writes);
  }
  clear_rows<kKeySplits>(tokens, kChunk, reads);
  clear_rows<kKeySplits>(kChunk + tokens, 2 * kChunk, reads);
  clear_rows<kKeySplits>(tokens, kChunk, writes);
  return divided;
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
