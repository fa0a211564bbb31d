// The decays in the backward of the chunk algorithm: the pairs of tokens of a channel gate, and the gradient of g. dg_t
// sums every term whose product of decays contains d_t (docs/equations.md derives it): z (from the state before the
// chunk to the state after the chunk) + Σ_{r≥t} x_r (from the state before the chunk to row r) + Σ_{j<t} y_j (from row
// j to the state after the chunk) + the pairs r ≥ t > j. Included once per target.
#if defined(EFLA_CPU_CHUNK_BWD_DECAY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_CHUNK_BWD_DECAY_INL_H_
#undef EFLA_CPU_CHUNK_BWD_DECAY_INL_H_
#else
#define EFLA_CPU_CHUNK_BWD_DECAY_INL_H_
#endif

#include "efla/cpu/delta/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {

// The inputs and the scratch of the gradient of g.
struct DecayGradient {
  float* state_sums = nullptr;   // per panel [K, kLanes]: sums of dS ∘ S over its columns
  float* reads = nullptr;        // [kChunk, Kp] x: reads of the state before the chunk
  float* writes = nullptr;       // [kChunk, Kp] y: writes to the state after it
  float* half_reads = nullptr;   // channel: [kHalfChunk, Kp] pairs of the second half's rows with the first half's
  float* half_writes = nullptr;  // channel: [kHalfChunk, Kp] pairs of the first half's rows with the second half's
  float* dg = nullptr;           // [kChunk, Kp]
  float* pairs = nullptr;        // scalar: [2 kChunk, kChunk] dP ∘ P, then dL ∘ L

  void lay_out(Arena& arena, std::int64_t stride, std::int64_t state_rows) {
    state_sums = arena.floats(state_rows * kLanes);
    for (float** rows : {&reads, &writes, &dg}) *rows = arena.floats(kChunk * stride);
    for (float** rows : {&half_reads, &half_writes}) *rows = arena.floats(kHalfChunk * stride);
    pairs = arena.floats(2 * kChunk * kChunk);
  }
};

// The inputs and outputs of the pairs of a chunk.
struct ChunkGradients {
  const ChunkScratch& chunk;
  const DecayGradient& decay;
  const float* dscores;  // [2 kChunk, kChunk]: dP, then dL
  float* dq;             // [kChunk, Kp]
  float* dk;             // [kChunk, Kp]; with two keys dκ [kChunk, Kp] follows
};

// Computes one key panel of the pairs of a row of the second half and a row of the first, with a channel gate. Their
// gradients go through q_half, k_half and k_tail (decay-inl.h). This type has the rows of the second half.
struct SecondHalfTiles {
  const ChunkGradients& s;
  std::int64_t key;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {  // row of the second half
    const ChunkScratch& c = s.chunk;
    const std::int64_t half = r * c.key_stride + key, at = half + kHalfChunk * c.key_stride;
    const float* dp = s.dscores + (kHalfChunk + r) * kChunk;
    const float* k_tail = c.decay.k_tail + key;
    Tile<M> tile;
    tile.zero();
    tile.multiply_add(dp, kChunk, 1, k_tail, c.key_stride, kHalfChunk);
    tile.multiply(c.decay.half_prefix + half, c.key_stride);
    tile.template store_product<false>(c.q + at, s.decay.half_reads + half, c.key_stride);
    tile.add_rows(s.dq + at, c.key_stride);
    tile.store(s.dq + at, c.key_stride);
    tile.zero();
    tile.multiply_add(dp + kChunk * kChunk, kChunk, 1, k_tail, c.key_stride, kHalfChunk);
    tile.multiply(c.decay.half_prefix + half, c.key_stride);
    const std::int64_t erase_at = kTwoKeys ? at + kChunk * c.key_stride : at;  // κ and dκ follow k and dk
    tile.template store_product<true>(c.k + erase_at, s.decay.half_reads + half, c.key_stride);
    tile.add_rows(s.dk + erase_at, c.key_stride);
    tile.store(s.dk + erase_at, c.key_stride);
  }
};

// Computes the gradients of the same pairs for the rows of the first half.
struct FirstHalfTiles {
  const ChunkGradients& s;
  std::int64_t rest, key;  // rest: rows of the second half

  template <int M>
  HWY_INLINE void run(std::int64_t j) {
    const ChunkScratch& c = s.chunk;
    const std::int64_t at = j * c.key_stride + key;
    const float* dp = s.dscores + kHalfChunk * kChunk + j;
    Tile<M> tile;
    tile.zero();
    tile.multiply_add(dp, 1, kChunk, c.decay.q_half + key, c.key_stride, rest);
    tile.multiply_add(dp + kChunk * kChunk, 1, kChunk, c.decay.k_half + key, c.key_stride, rest);
    tile.multiply(c.decay.half_suffix + at, c.key_stride);
    tile.template store_product<false>(c.k + at, s.decay.half_writes + at, c.key_stride);
    tile.add_rows(s.dk + at, c.key_stride);
    tile.store(s.dk + at, c.key_stride);
  }
};

// Adds one key panel of the pairs first ≤ j ≤ r < last of one half, one by one, with a channel gate. w is the product
// of the decays between tokens j and r.
HWY_INLINE void half_pairs(const ChunkGradients& s, std::int64_t key, std::int64_t first, std::int64_t last) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  const std::int64_t n = c.key_stride;
  HWY_ALIGN float weights[kHalfChunk * kLanes];
  for (std::int64_t i = key; i < key + kPanel; i += kLanes) {
    for (std::int64_t r = first; r < last; ++r) {
      const float* dp = s.dscores + r * kChunk;
      const float* dl = dp + kChunk * kChunk;
      const FloatVec q = hn::Load(d, c.q + r * n + i);
      FloatVec k = hn::Load(d, c.k + r * n + i);
      const FloatVec diagonal = hn::Set(d, dp[r]);
      FloatVec dq = hn::MulAdd(diagonal, k, hn::Load(d, s.dq + r * n + i));
      FloatVec dk = hn::MulAdd(diagonal, q, hn::Load(d, s.dk + r * n + i));
      if constexpr (kTwoKeys) {  // from here on k is κ
        hn::Store(dk, d, s.dk + r * n + i);
        k = hn::Load(d, c.erase_keys() + r * n + i);
        dk = hn::Load(d, s.dk + (kChunk + r) * n + i);
      }
      FloatVec w = hn::Load(d, c.decay.token + r * n + i);
      for (std::int64_t j = r - 1; j >= first; --j) {
        hn::Store(w, d, weights + (j - first) * kLanes);
        const FloatVec x = hn::Mul(w, hn::Load(d, c.k + j * n + i));
        dq = hn::MulAdd(hn::Set(d, dp[j]), x, dq);
        dk = hn::MulAdd(hn::Set(d, dl[j]), x, dk);
        w = hn::Mul(w, hn::Load(d, c.decay.token + j * n + i));
      }
      hn::Store(dq, d, s.dq + r * n + i);
      hn::Store(dk, d, s.dk + (kTwoKeys ? kChunk + r : r) * n + i);
      FloatVec crossing = hn::Zero(d);  // Σ_{j<t} of the pairs (r, j)
      for (std::int64_t j = first; j < r; ++j) {
        const std::int64_t at = j * n + i;
        const FloatVec both = hn::MulAdd(hn::Set(d, dp[j]), q, hn::Mul(hn::Set(d, dl[j]), k));
        const FloatVec dk_j = hn::Mul(hn::Load(d, weights + (j - first) * kLanes), both);
        hn::Store(hn::Add(hn::Load(d, s.dk + at), dk_j), d, s.dk + at);
        crossing = hn::MulAdd(hn::Load(d, c.k + at), dk_j, crossing);
        hn::Store(hn::Add(hn::Load(d, s.decay.dg + at + n), crossing), d, s.decay.dg + at + n);
      }
    }
  }
}

// Adds to one key panel of dq, dk and dg the terms from inside of the chunk, with a channel gate. With kTwoKeys the
// gradient of the erase keys is dκ.
HWY_INLINE void channel_pairs(const ChunkGradients& s, std::int64_t tokens, std::int64_t key) {
  const std::int64_t rest = tokens - kHalfChunk;
  if (rest > 0) {
    SecondHalfTiles second{s, key};
    for_tiles(rest, second);
    FirstHalfTiles first{s, rest, key};
    for_tiles(kHalfChunk, first);
  }
  for (std::int64_t first = 0; first < tokens; first += kHalfChunk) {
    half_pairs(s, key, first, std::min(first + kHalfChunk, tokens));
  }
}

// Sums dS ∘ S over the columns of one panel, before dS changes.
HWY_INLINE void state_sums(const float* state, const float* dstate, std::int64_t key_dim, float* sums) {
  const FloatTag d;
  for (std::int64_t i = 0; i < key_dim; ++i) {
    const FloatVec left = hn::Mul(hn::Load(d, state + i * kPanel), hn::Load(d, dstate + i * kPanel));
    const FloatVec right = hn::Load(d, state + i * kPanel + kLanes);
    hn::Store(hn::MulAdd(right, hn::Load(d, dstate + i * kPanel + kLanes), left), d, sums + i * kLanes);
  }
}

// Adds Σ over r ≥ t > j of dP_rj P_rj + dL_rj L_rj to sums[t] for every token t > 0, with a scalar gate.
HWY_INLINE void scalar_pairs(std::int64_t tokens, const float* pairs, float* sums) {
  float columns[kChunk] = {};  // Σ_{r≥t} of column j
  for (std::int64_t t = tokens - 1; t > 0; --t) {
    const float* row = pairs + t * kChunk;
    for (std::int64_t j = 0; j < t; ++j) {
      columns[j] += row[j] + row[kChunk * kChunk + j];
      sums[t] += columns[j];
    }
  }
}

// Computes dg of a chunk from its terms and stores dg.
template <class T>
HWY_INLINE void finish_decay(const DeltaBackward<T>& p, const ChunkPlace& at, const ChunkDecay& decay,
                             DecayGradient& s) {
  const FloatTag d;
  const std::int64_t n = decay.key_stride, key_dim = p.shape.key_dim;
  const std::int64_t panels = round_up(p.shape.value_dim, kPanel) / kPanel;
  HWY_ALIGN float through[kPanel];
  float pair_sums[kChunk] = {};
  if (decay.kind == Decay::scalar) scalar_pairs(at.tokens, s.pairs, pair_sums);
  for (std::int64_t i = 0; i < n; i += kPanel) {
    for (std::int64_t channel = i; channel < i + kPanel; ++channel) {  // z
      FloatVec sum = hn::Zero(d);
      for (std::int64_t panel = 0; channel < key_dim && panel < panels; ++panel) {
        sum = hn::Add(sum, hn::Load(d, s.state_sums + (panel * key_dim + channel) * kLanes));
      }
      through[channel - i] = decay.whole[channel] * hn::GetLane(hn::SumOfLanes(d, sum));
    }
    for (std::int64_t lanes = 0; lanes < kPanel; lanes += kLanes) {
      const std::int64_t column = i + lanes;
      FloatVec reads = hn::Load(d, through + lanes), half = hn::Zero(d);
      for (std::int64_t t = at.tokens - 1; t >= 0; --t) {
        const std::int64_t row = t * n + column;
        reads = hn::Add(reads, hn::Load(d, s.reads + row));
        FloatVec dg = hn::Add(reads, hn::Load(d, s.dg + row));
        if (decay.kind == Decay::channel && t >= kHalfChunk) {
          half = hn::Add(half, hn::Load(d, s.half_reads + row - kHalfChunk * n));
          dg = hn::Add(dg, half);
        }
        hn::Store(dg, d, s.dg + row);
      }
      FloatVec writes = hn::Zero(d);
      half = hn::Zero(d);
      const bool halves = decay.kind == Decay::channel && at.tokens > kHalfChunk;
      for (std::int64_t t = 1; t < at.tokens; ++t) {
        const std::int64_t row = t * n + column;
        writes = hn::Add(writes, hn::Load(d, s.writes + row - n));
        FloatVec dg = hn::Add(writes, hn::Load(d, s.dg + row));
        if (halves && t < kHalfChunk) {
          half = hn::Add(half, hn::Load(d, s.half_writes + row - n));
          dg = hn::Add(dg, half);
        }
        hn::Store(dg, d, s.dg + row);
      }
    }
  }
  const MicroSteps::Tokens decayed = at.decayed();
  for (std::int64_t token = decayed.first; token < decayed.last; ++token) {
    const std::int64_t r = decayed.step_row(token);
    const float* row = s.dg + r * n;
    float* out = p.dg.at(at.i_b, token, at.i_h);
    if (decay.kind == Decay::channel) {
      store_row(row, 1.0F, key_dim, out, p.dg.stride[3]);
    } else {
      FloatVec sum = hn::Zero(d);
      for (std::int64_t i = 0; i < n; i += kLanes) sum = hn::Add(sum, hn::Load(d, row + i));
      *out = hn::GetLane(hn::SumOfLanes(d, sum)) + pair_sums[r];
    }
  }
}

}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
