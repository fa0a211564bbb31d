// Keys and queries with a decay of channels as operands of the matrix unit. With c_r = d_0 … d_r over a chunk,
// K_read = K ⊙ c and Q_read = Q ⊙ c meet the state before it. Where c stays within bounds between which nothing
// overflows or underflows, keys are divided by it: with K_write = K ⊘ c
//
//   L = stril(K_read K_writeᵀ),   P = tril(Q_read K_writeᵀ),   S ← diag(c_last) (S + K_writeᵀ U)
//
// are products of matrices, each term as exact as any product. Elsewhere L and P are made as they are without a matrix
// unit (chunk-inl.h), and K_write are the keys times the decays to the chunk's end. Included by the kernels that
// include parts-inl.h.
#pragma once

#include "efla/cpu/chunk-inl.h"
#include "efla/cpu/parts-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Between these a chunk's decays, multiplied up, may be divided by; a decay per head too.
inline constexpr float kSmallestDivisor = 0x1p-60F, kLargestDivisor = 0x1p60F;

// c, its last row, and whether keys may be divided by it.
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

template <int kKeyParts>
HWY_INLINE void cut_divided_keys(std::int64_t tokens, const ChunkScratch& c, PartTiles reads, PartTiles writes) {
  const FloatTag d;
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t along = 0; along < reads.depth; ++along) {
      const std::int64_t i = r * c.key_stride + along * kTileDepth, j = i + kLanes;
      const FloatVec c0 = hn::Load(d, c.decay.prefix + i), c1 = hn::Load(d, c.decay.prefix + j);
      const FloatVec k0 = hn::Load(d, c.k + i), k1 = hn::Load(d, c.k + j);
      const FloatVec q0 = hn::Mul(hn::Load(d, c.q + i), c0), q1 = hn::Mul(hn::Load(d, c.q + j), c1);
      cut_pairs<kKeyParts>(hn::Mul(k0, c0).raw, hn::Mul(k1, c1).raw, reads.row(r, along), reads.part_stride());
      cut_pairs<kKeyParts>(q0.raw, q1.raw, reads.row(kChunk + r, along), reads.part_stride());
      cut_pairs<kKeyParts>(hn::Div(k0, c0).raw, hn::Div(k1, c1).raw, writes.row(r, along), writes.part_stride());
    }
  }
}

// Once load_chunk has filled q, k and the decays: K_read and under it Q_read into the left operand `reads`, K_write
// into `writes`, rows behind the last token zeros. Whether keys are divided by c; if not P and L are made.
template <int kKeyParts>
HWY_INLINE bool cut_decayed_keys(const ChunkPlace& at, std::int64_t key_dim, ChunkScratch& c, PartTiles reads,
                                 PartTiles writes) {
  const std::int64_t tokens = at.tokens;
  const bool divided = multiply_channels(tokens, c.decay);
  if (divided) {
    cut_divided_keys<kKeyParts>(tokens, c, reads, writes);
  } else {
    std::fill_n(c.scores, 2 * kChunk * kChunk, 0.0F);
    compute_scores(at, key_dim, c);
    cut_rows<kKeyParts>(c.k_read, c.key_stride, 0, tokens, reads);
    cut_rows<kKeyParts>(c.q_read, c.key_stride, kChunk, tokens, reads);
    cut_rows<kKeyParts>(c.k_write, c.key_stride, 0, tokens, writes);
  }
  clear_rows<kKeyParts>(tokens, kChunk, reads);
  clear_rows<kKeyParts>(kChunk + tokens, 2 * kChunk, reads);
  clear_rows<kKeyParts>(tokens, kChunk, writes);
  return divided;
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
