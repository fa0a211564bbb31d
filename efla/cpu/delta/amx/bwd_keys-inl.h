// The second half of a chunk of one value head in the backward on AMX: computes the gradients of scores, queries, keys,
// β and g from U, G, S and dS. amx/bwd_values-inl.h has the first half and the equations.
#pragma once

#include <utility>

#include "efla/cpu/delta/amx/bwd_values-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Computes dP, zero above the diagonal, and dL + dLᵀ, zero on the diagonal, in splits. With a channel gate the second
// matrix is dL alone. If keys are then divided, the diagonal of dP moves to s.diagonal, times `scale`. If they are not,
// both matrices stay in s.dscores, times `scale`, and are not split.
template <Decay kDecay, class T>
HWY_NOINLINE void score_gradients(float scale, AmxBwdScratch& s) {
  constexpr int kSplits = kStateSplits<T>;
  float *dp = s.dscores, *dl = dp + kChunk * kChunk;
  zero_sums();
  add_products<kOutSplits<T>, kSplits, Product::lower>(s.douts, 0, s.u_t_right, 0, s.prefetches);
  store_sums(dp, kChunk);
  zero_sums();
  add_products<kSplits, kSplits, Product::lower>(s.gs, 0, s.u_t_right, 0, s.prefetches);
  store_sums(dl, kChunk);
  if constexpr (kDecay == Decay::scalar) {
    multiply_rows(dp, s.chunk.scores, 2 * kChunk * kChunk, s.pairs);
    weigh_scores(kChunk, s.chunk.decay, dp, dl);
  }
  for (std::int64_t r = 0; r < kChunk; ++r) {
    std::fill(dp + r * kChunk + r + 1, dp + (r + 1) * kChunk, 0.0F);
    dl[r * kChunk + r] = 0.0F;
    for (std::int64_t j = 0; j < r; ++j) dl[j * kChunk + r] = kDecay == Decay::channel ? 0.0F : dl[r * kChunk + j];
  }
  if constexpr (kDecay == Decay::channel) {
    if (!s.divided) {
      for (std::int64_t i = 0; i < 2 * kChunk * kChunk; ++i) s.dscores[i] *= scale;
      return;
    }
    for (std::int64_t r = 0; r < kChunk; ++r) s.diagonal[r] = scale * std::exchange(dp[r * (kChunk + 1)], 0.0F);
  }
  split_panel<kSplits>(dp, kChunk, kChunk, 0, s.dp, s.dp_right);
  split_panel<kSplits>(dl, kChunk, kChunk, 0, s.dl, s.dl_right);
  transpose_rows<kSplits>(s.dp, 0, s.dp_t_right, 0, 1);
  if constexpr (kDecay == Decay::channel) transpose_rows<kSplits>(s.dl, 0, s.dl_t_right, 0, 1);
}

// Transposes the sums [32 key channels, kChunk] and stores them, times `scale`, to columns of dq or dk [kChunk, K].
HWY_INLINE void store_gradient(float scale, std::int64_t key_dim, float* sums, float* out) {
  constexpr std::int64_t kTileFloats = kTileRows * kTileRows;
  store_tile<0>(sums, kTileBytes);
  store_tile<1>(sums + kTileFloats, kTileBytes);
  store_tile<2>(sums + 2 * kTileFloats, kTileBytes);
  store_tile<3>(sums + 3 * kTileFloats, kTileBytes);
  const __m512 factor = _mm512_set1_ps(scale);
  HWY_ALIGN float tile[kTileFloats];
  for (std::int64_t i = 0; i < 4; ++i) {
    transpose_tile(reinterpret_cast<const Bf16Bits*>(sums + i * kTileFloats), reinterpret_cast<Bf16Bits*>(tile));
    float* to = out + i % 2 * kTileRows * key_dim + i / 2 * kTileRows;
    for (std::int64_t r = 0; r < kTileRows; ++r) {
      _mm512_store_ps(to + r * key_dim, _mm512_mul_ps(factor, _mm512_load_ps(tile + r * kTileRows)));
    }
  }
}

// Computes dq and dk, without a channel gate, for 32 key channels at a time.
template <Decay kDecay, int kKeySplits, class T>
HWY_NOINLINE void key_gradients(std::int64_t key_dim, float scale, AmxBwdScratch& s, float* dq, float* dk) {
  constexpr int kSplits = kStateSplits<T>;
  constexpr bool kFactors = kDecay == Decay::scalar;
  for (std::int64_t i = 0; i < key_dim; i += 2 * kTileRows) {
    const std::int64_t block = i / kTileRows;
    zero_sums();
    add_products<kSplits, kReadSplits<T, kDecay>>(s.state, block, s.dout_t_right, 0, s.prefetches);
    add_products<kKeySplits, kSplits>(s.keys_t, block, s.dp_t_right, 0, s.prefetches);
    store_gradient(scale, key_dim, s.sums, dq + i);
    zero_sums();
    add_products<kSplits, kSplits>(s.dstate, block, kFactors ? s.u_write_t_right : s.u_t_right, 0, s.prefetches);
    add_products<kSplits, kSplits>(s.state, block, s.g_t_right, 0, s.prefetches);
    add_products<kKeySplits, kSplits>(s.queries_t, block, s.dp_right, 0, s.prefetches);
    add_products<kKeySplits, kSplits>(s.keys_t, block, s.dl_right, 0, s.prefetches);
    store_gradient(scale, key_dim, s.sums, dk + i);
  }
}

// Computes dQ_read in dq, dK_read in dk, U dŜᵀ in gradient.writes and B in gradient.reads, with a channel gate. If keys
// are not divided, dŜ is dS, and the terms with dP or dL are left out.
template <int kKeySplits, class T>
HWY_NOINLINE void decayed_key_gradients(std::int64_t key_dim, float scale, AmxBwdScratch& s, float* dq, float* dk) {
  constexpr int kSplits = kStateSplits<T>;
  for (std::int64_t i = 0; i < key_dim; i += 2 * kTileRows) {
    const std::int64_t block = i / kTileRows;
    zero_sums();
    add_products<kSplits, kOutSplits<T>>(s.state, block, s.dout_t_right, 0, s.prefetches);
    if (s.divided)
      add_products<kKeySplits, kSplits, Product::exact>(s.write_keys_t, block, s.dp_t_right, 0, s.prefetches);
    store_gradient(scale, key_dim, s.sums, dq + i);
    zero_sums();
    add_products<kSplits, kSplits>(s.state, block, s.g_t_right, 0, s.prefetches);
    if (s.divided)
      add_products<kKeySplits, kSplits, Product::exact>(s.write_keys_t, block, s.dl_t_right, 0, s.prefetches);
    store_gradient(scale, key_dim, s.sums, dk + i);
    zero_sums();
    add_products<kSplits, kSplits>(s.dstate, block, s.u_t_right, 0, s.prefetches);
    store_gradient(scale, key_dim, s.sums, s.gradient.writes + i);
    if (!s.divided) continue;
    zero_sums();
    add_products<kKeySplits, kSplits, Product::exact>(s.queries_t, block, s.dp_right, 0, s.prefetches);
    add_products<kKeySplits, kSplits, Product::exact>(s.keys_t, block, s.dl_right, 0, s.prefetches);
    store_gradient(scale, key_dim, s.sums, s.gradient.reads + i);
  }
}

// Replaces the gradients of Q_read and K_read by dq and dk, and computes x and y. Pairs cancel in x only if both terms
// have the splits that were multiplied as factors, and if all products of splits were equally exact.
template <int kKeySplits>
HWY_NOINLINE void finish_decayed_keys(std::int64_t tokens, const AmxBwdScratch& s, float* dqs, float* dks) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  const DecayGradient& gradient = s.gradient;
  for (float* rows : {gradient.half_reads, gradient.half_writes}) {
    std::fill_n(rows, kHalfChunk * c.key_stride, 0.0F);
  }
  std::fill_n(gradient.dg, kChunk * c.key_stride, 0.0F);
  const auto splits = [](FloatVec x) HWY_ATTR { return FloatVec{sum_of_splits<kKeySplits>(x.raw)}; };
  for (std::int64_t i = 0; i < tokens * c.key_stride; i += kLanes) {
    const FloatVec q = hn::Load(d, c.q + i), k = hn::Load(d, c.k + i), read = hn::Load(d, c.decay.prefix + i);
    const FloatVec dq_read = hn::Load(d, dqs + i), dk_read = hn::Load(d, dks + i);
    const FloatVec through = hn::Load(d, gradient.writes + i);
    FloatVec x = hn::MulAdd(splits(hn::Mul(q, read)), dq_read, hn::Mul(splits(hn::Mul(k, read)), dk_read));
    FloatVec dq = hn::Mul(read, dq_read), dk = hn::Mul(read, dk_read);
    if (s.divided) {
      const FloatVec pairs = hn::Load(d, gradient.reads + i), diagonal = hn::Set(d, s.diagonal[i / c.key_stride]);
      const FloatVec k_write = hn::Div(k, read);
      x = hn::NegMulAdd(splits(k_write), pairs, x);
      hn::Store(hn::Mul(k_write, through), d, gradient.writes + i);
      dq = hn::MulAdd(diagonal, k, dq);
      dk = hn::MulAdd(diagonal, q, hn::Add(dk, hn::Div(hn::Add(through, pairs), read)));
    } else {
      const FloatVec dk_write = hn::Mul(hn::Load(d, c.decay.suffix + i), through);
      hn::Store(hn::Mul(k, dk_write), d, gradient.writes + i);
      dk = hn::Add(dk, dk_write);
    }
    hn::Store(x, d, gradient.reads + i);
    hn::Store(dq, d, dqs + i);
    hn::Store(dk, d, dks + i);
  }
  if (s.divided) return;
  for (std::int64_t key = 0; key < c.key_stride; key += kPanel) {
    channel_pairs({c, gradient, s.dscores, dqs, dks}, tokens, key);
  }
}

// Computes dbeta, and adds to dk the gradient through the gains.
template <class T>
HWY_INLINE void finish_chunk(const DeltaBackward<T>& p, const ChunkPlace& at, float scale, const AmxBwdScratch& s,
                             float* dk) {
  const FloatTag d;
  const GainSlopes slopes = gain_slopes(p.rule.step, at.tokens, s.chunk.beta, s.chunk.lambda);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    FloatVec da = hn::Zero(d), db = hn::Zero(d);
    for (std::int64_t v = 0; v < p.shape.value_dim; v += kPanel) {
      const std::int64_t partial = (v / kPanel * kChunk + r) * kLanes;
      da = hn::Add(da, hn::Load(d, s.da + partial));
      db = hn::Add(db, hn::Load(d, s.db + partial));
    }
    finish_gains(p, at, r, scale * hn::GetLane(hn::SumOfLanes(d, da)), scale * hn::GetLane(hn::SumOfLanes(d, db)),
                 s.chunk, slopes, dk + r * s.chunk.key_stride);
  }
}

// Computes dg of a chunk with a scalar gate.
template <class T>
HWY_INLINE void finish_scalar_decay(const DeltaBackward<T>& p, const ChunkPlace& at, float scale,
                                    const AmxBwdScratch& s) {
  const std::int64_t panels = round_up(p.shape.value_dim, kPanel) / kPanel;
  const auto sum = [&](const float* partial, std::int64_t r, std::int64_t rows) HWY_ATTR {
    __m512 all = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < panels; ++i) {
      all = _mm512_add_ps(all, _mm512_load_ps(partial + (i * rows + r) * kLanes));
    }
    return _mm512_reduce_add_ps(all);
  };
  float dg[kChunk] = {};
  scalar_pairs(at.tokens, s.pairs, dg);
  float reads = s.whole * sum(s.through, 0, 1), writes = 0.0F;
  for (std::int64_t t = at.tokens - 1; t >= 0; --t) dg[t] += reads += sum(s.x, t, kChunk);
  for (std::int64_t t = 0; t < at.tokens; ++t) {
    p.dg(at.i_b, at.start + t, at.i_h, std::int64_t{0}) = scale * (dg[t] + writes);
    writes += sum(s.y, t, kChunk);
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
