// The decays of a chunk, and the scores of rules with a decay. Included once per target.
//
// With d_t = e^{g_t}, every factor here is a product of consecutive d_t (decayed_keys-inl.h and recurrent_fwd.cc also
// divide), which is at most 1 for g ≤ 0. Nothing overflows, and a product underflows only if the true factor is below
// 1e-38. Differences of a running sum of g over the whole sequence would lose digits as the sum grows. Products of many
// equal weak decays lose some digits too, because every decay is rounded in the same direction (docs/numerics.md).
#if defined(EFLA_CPU_DECAY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_DECAY_INL_H_
#undef EFLA_CPU_DECAY_INL_H_
#else
#define EFLA_CPU_DECAY_INL_H_
#endif

#include <cmath>

#include "efla/cpu/common/tile-inl.h"
#include "efla/cpu/common/workspace.h"
#include "efla/cpu/delta/keys.h"
#include "efla/rule/problem.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {

// With a channel gate, scores are matrix products between the two halves of a chunk, and sums over pairs of tokens
// inside of each half.
inline constexpr std::int64_t kHalfChunk = kChunk / 2;

// The decays of a chunk and their products. Rows are [Kp]. With a scalar gate all elements of a row are equal.
struct ChunkDecay {
  Decay kind = Decay::none;
  std::int64_t key_stride = 0;   // Kp
  float* token = nullptr;        // [kChunk, Kp] d_r
  float* prefix = nullptr;       // [kChunk, Kp] d_0 … d_r
  float* suffix = nullptr;       // [kChunk, Kp] d_{r+1} … d_last
  float* whole = nullptr;        // [Kp] d_0 … d_last
  float* weights = nullptr;      // scalar: [kChunk, kChunk] d_{j+1} … d_r for j ≤ r, 0 elsewhere
  float* half_prefix = nullptr;  // channel: [kHalfChunk, Kp] products from the second half's first token to this row
  float* half_suffix = nullptr;  // channel: [kHalfChunk, Kp] products after this row to the first half's last token
  float* q_half = nullptr;       // channel: [kHalfChunk, Kp] the second half's q ⊙ half_prefix
  float* k_half = nullptr;       // channel: [kHalfChunk, Kp] the second half's erase keys ⊙ half_prefix
  float* k_tail = nullptr;       // channel: [kHalfChunk, Kp] the first half's k ⊙ half_suffix

  void lay_out(Arena& arena, Decay decay, std::int64_t stride) {
    kind = decay;
    key_stride = stride;
    for (float** rows : {&token, &prefix, &suffix}) *rows = arena.floats(kChunk * stride);
    whole = arena.floats(stride);
    if (kind == Decay::scalar) weights = arena.floats(kChunk * kChunk);
    if (kind != Decay::channel) return;
    for (float** rows : {&half_prefix, &half_suffix, &q_half, &k_half, &k_tail}) {
      *rows = arena.floats(kHalfChunk * stride);
    }
  }
};

// Computes out = x ⊙ y over a multiple of kLanes elements.
HWY_INLINE void multiply_rows(const float* HWY_RESTRICT x, const float* HWY_RESTRICT y, std::int64_t count,
                              float* HWY_RESTRICT out) {
  const FloatTag d;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, x + i), hn::Load(d, y + i)), d, out + i);
  }
}

// Computes x ← e^x over a multiple of kLanes elements. Highway's exp treats a NaN as −∞ and is not defined above 104.
HWY_INLINE void exponentials(float* x, std::int64_t count) {
  const FloatTag d;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const FloatVec g = hn::Load(d, x + i);
    hn::Store(hn::IfThenElse(hn::IsNaN(g), g, hn::Exp(d, hn::Min(g, hn::Set(d, 104.0F)))), d, x + i);
  }
}

// Computes row r of the tokens' decays, e^g, from one value of g, or from `count` values, one per channel.
HWY_INLINE void load_decay(const float* g, std::int64_t stride, std::int64_t count, std::int64_t r, ChunkDecay& s) {
  float* row = s.token + r * s.key_stride;
  if (s.kind == Decay::scalar) {
    std::fill_n(row, s.key_stride, std::exp(*g));
    return;
  }
  load_row(g, stride, count, s.key_stride, row);
  exponentials(row, s.key_stride);
}

// Computes rows r = first … last − 1 of out: the products d_first … d_r.
HWY_INLINE void running_products(const ChunkDecay& s, std::int64_t first, std::int64_t last, float* out) {
  const std::int64_t n = s.key_stride;
  if (first < last) std::copy_n(s.token + first * n, n, out);
  for (std::int64_t r = first + 1; r < last; ++r) {
    float* row = out + (r - first) * n;
    multiply_rows(row - n, s.token + r * n, n, row);
  }
}

// Computes rows r = 0 … last − 1 of out: the products d_{r+1} … d_{last−1}.
HWY_INLINE void remaining_products(const ChunkDecay& s, std::int64_t last, float* out) {
  const std::int64_t n = s.key_stride;
  std::fill_n(out + (last - 1) * n, n, 1.0F);
  for (std::int64_t r = last - 2; r >= 0; --r) multiply_rows(out + (r + 1) * n, s.token + (r + 1) * n, n, out + r * n);
}

// Computes the weights of scores, with a scalar gate: d_{j+1} … d_r for j ≤ r, 0 elsewhere.
HWY_INLINE void multiply_weights(std::int64_t tokens, const float* decays, std::int64_t stride, float* weights) {
  const FloatTag d;
  constexpr int kRowVectors = static_cast<int>(kChunk / kLanes);
  FloatVec row[kRowVectors], column[kRowVectors];
  unroll<kRowVectors>([&](auto i) EFLA_UNROLLED {
    row[i] = hn::Zero(d);
    column[i] = hn::Iota(d, static_cast<float>(i * kLanes));
  });
  for (std::int64_t r = 0; r < tokens; ++r) {
    const FloatVec decay = hn::Set(d, decays[r * stride]), now = hn::Set(d, static_cast<float>(r));
    unroll<kRowVectors>([&](auto i) EFLA_UNROLLED {
      row[i] = hn::IfThenElse(hn::Eq(column[i], now), hn::Set(d, 1.0F), hn::Mul(decay, row[i]));
      hn::Store(row[i], d, weights + r * kChunk + i * kLanes);
    });
  }
  std::fill_n(weights + tokens * kChunk, (kChunk - tokens) * kChunk, 0.0F);
}

// Computes all products from the tokens' decays, for at least one token.
HWY_INLINE void multiply_decays(std::int64_t tokens, ChunkDecay& s) {
  running_products(s, 0, tokens, s.prefix);
  remaining_products(s, tokens, s.suffix);
  std::copy_n(s.prefix + (tokens - 1) * s.key_stride, s.key_stride, s.whole);
  if (s.kind == Decay::scalar) {
    multiply_weights(tokens, s.token, s.key_stride, s.weights);
  } else if (tokens > kHalfChunk) {
    running_products(s, kHalfChunk, tokens, s.half_prefix);
    remaining_products(s, kHalfChunk, s.half_suffix);
  }
}

// Multiplies scores without decay by their weights, with a scalar gate.
HWY_INLINE void weigh_scores(std::int64_t tokens, const ChunkDecay& s, float* p_scores, float* l_scores) {
  const FloatTag d;
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t j = r * kChunk; j <= r * kChunk + r; j += kLanes) {
      const FloatVec weight = hn::Load(d, s.weights + j);
      hn::Store(hn::Mul(weight, hn::Load(d, p_scores + j)), d, p_scores + j);
      hn::Store(hn::Mul(weight, hn::Load(d, l_scores + j)), d, l_scores + j);
    }
  }
}

// Computes the scores of the pairs first ≤ j ≤ r < last, P with j ≤ r and L with j < r, with a channel gate. With
// kTwoKeys rows r of L are from the erase keys, which follow k.
HWY_INLINE void pair_scores(const float* q, const float* k, const ChunkDecay& s, std::int64_t first, std::int64_t last,
                            float* p_scores, float* l_scores) {
  const FloatTag d;
  const std::int64_t n = s.key_stride;
  HWY_ALIGN float p_sums[kHalfChunk * kLanes], l_sums[kHalfChunk * kLanes];
  for (std::int64_t r = first; r < last; ++r) {
    std::fill_n(p_sums, kHalfChunk * kLanes, 0.0F);
    std::fill_n(l_sums, kHalfChunk * kLanes, 0.0F);
    for (std::int64_t i = 0; i < n; i += kPanel) {
      const FloatVec q0 = hn::Load(d, q + r * n + i), q1 = hn::Load(d, q + r * n + i + kLanes);
      const float* keys = kTwoKeys ? k + kChunk * n : k;
      const FloatVec k0 = hn::Load(d, keys + r * n + i), k1 = hn::Load(d, keys + r * n + i + kLanes);
      FloatVec w0 = hn::Load(d, s.token + r * n + i), w1 = hn::Load(d, s.token + r * n + i + kLanes);
      for (std::int64_t j = r - 1; j >= first; --j) {
        const std::int64_t at = j * n + i;
        const FloatVec x0 = hn::Mul(w0, hn::Load(d, k + at)), x1 = hn::Mul(w1, hn::Load(d, k + at + kLanes));
        float* p_sum = p_sums + (j - first) * kLanes;
        float* l_sum = l_sums + (j - first) * kLanes;
        hn::Store(hn::MulAdd(q1, x1, hn::MulAdd(q0, x0, hn::Load(d, p_sum))), d, p_sum);
        hn::Store(hn::MulAdd(k1, x1, hn::MulAdd(k0, x0, hn::Load(d, l_sum))), d, l_sum);
        w0 = hn::Mul(w0, hn::Load(d, s.token + at));
        w1 = hn::Mul(w1, hn::Load(d, s.token + at + kLanes));
      }
    }
    for (std::int64_t j = first; j < r; ++j) {
      p_scores[r * kChunk + j] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, p_sums + (j - first) * kLanes)));
      l_scores[r * kChunk + j] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, l_sums + (j - first) * kLanes)));
    }
    p_scores[r * kChunk + r] = dot(q + r * n, k + r * n, n);
  }
}

}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
