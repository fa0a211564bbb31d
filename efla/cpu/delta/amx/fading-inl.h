// Decides whether a chunk erases so much of a state that the error of rounding the state to two splits would be large
// compared with the rest (docs/numerics.md). Included by amx/chunk_fwd.cc, once.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "efla/cpu/delta/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Two splits have errors of 2⁻¹⁷ of the state before a chunk. A chunk that leaves less than this fraction of ‖S‖² is
// computed with three splits.
inline constexpr float kLittleLeft = 0x1p-12F;

// Computes the weights [kChunk] for norm_before. k_norm has the factors of the L2 norm; nullptr: ones.
HWY_INLINE void weigh_reads(std::int64_t tokens, const ChunkScratch& c, const float* k_norm, float* weights) {
  const FloatTag d;
  const FloatVec decay = hn::Set(d, c.decay.whole == nullptr ? 1.0F : *c.decay.whole);
  for (std::int64_t r = 0; r < kChunk; r += kLanes) {
    const FloatVec lambda = hn::Load(d, c.lambda + r);
    const FloatVec factor = k_norm == nullptr ? decay : hn::Mul(decay, hn::Load(d, k_norm + r));
    const auto used = hn::And(hn::FirstN(d, static_cast<std::size_t>(std::clamp<std::int64_t>(tokens - r, 0, kLanes))),
                              hn::Gt(lambda, hn::Zero(d)));
    hn::Store(hn::IfThenElseZero(used, hn::Div(hn::Mul(factor, factor), lambda)), d, weights + r);
  }
}

// Returns an estimate of ‖D S‖² from a panel of K S: Σ ‖(D S)ᵀk‖²/λ over the chunk's keys. Only the part of D S that
// the keys read is seen.
HWY_INLINE float norm_before(const float* reads, const float* weights) {
  __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
  for (std::int64_t r = 0; r < kChunk; ++r, reads += kPanel) {
    const __m512 weight = _mm512_set1_ps(weights[r]);
    const __m512 x0 = _mm512_load_ps(reads), x1 = _mm512_load_ps(reads + kLanes);
    sum0 = _mm512_fmadd_ps(_mm512_mul_ps(weight, x0), x0, sum0);
    sum1 = _mm512_fmadd_ps(_mm512_mul_ps(weight, x1), x1, sum1);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1));
}

// Returns whether the tokens up to `last` leave little of a state with this norm_before. The squared norm of the new
// state is at least ‖Sᵀk‖²/λ of the last key, with Sᵀk = e + λu. A NaN does not count as little.
HWY_INLINE bool leaves_little(const float* errors, const float* u, std::int64_t last, const float* lambda,
                              float before) {
  __m512 norm = _mm512_setzero_ps();
  for (std::int64_t i = last * kPanel; i < (last + 1) * kPanel; i += kLanes) {
    const __m512 read =
        _mm512_fmadd_ps(_mm512_set1_ps(lambda[last]), _mm512_load_ps(u + i), _mm512_load_ps(errors + i));
    norm = _mm512_fmadd_ps(read, read, norm);
  }
  return _mm512_reduce_add_ps(norm) < kLittleLeft * lambda[last] * before;
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
