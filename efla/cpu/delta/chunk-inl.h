// The parts that the forward and the backward of the chunk algorithm share: loading a chunk's q, k, gains and decays
// into scratch, its score matrices, and the substitution that computes U. kernels.h has the equations. Included once
// per target.
#if defined(EFLA_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_CHUNK_INL_H_
#undef EFLA_CPU_CHUNK_INL_H_
#else
#define EFLA_CPU_CHUNK_INL_H_
#endif

#include <hwy/cache_control.h>

#include <cmath>

#include "efla/cpu/common/prefetch_list.h"
#include "efla/cpu/common/tile-inl.h"
#include "efla/cpu/common/workspace.h"
#include "efla/cpu/delta/decay-inl.h"
#include "efla/cpu/delta/gain-inl.h"
#include "efla/rule/micro_steps.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {

// The place of a chunk: batch entry, value head, its query head, first token, number of tokens (at most kChunk). Where
// a token has several steps, start and tokens count steps.
struct ChunkPlace {
  std::int64_t i_b, i_h, i_q, start, tokens;
  MicroSteps steps;

  ChunkPlace(const DeltaShape& shape, const Sequence& sequence, std::int64_t i_h, std::int64_t start,
             MicroSteps steps = {})
      : i_b(sequence.i_b),
        i_h(i_h),
        i_q(i_h / shape.group()),
        start(start),
        tokens(std::min(kChunk, sequence.end - start)),
        steps(steps) {}

  // Return the tokens whose rows of q, o and dout, or of g, belong to a step of the chunk.
  MicroSteps::Tokens read() const { return steps.read(start, start + tokens); }
  MicroSteps::Tokens decayed() const { return steps.decayed(start, start + tokens); }
};

// Scratch for one chunk of one head. Kp is K rounded up to whole panels; row r is token start + r.
struct ChunkScratch {
  std::int64_t key_stride = 0;  // Kp
  float* q = nullptr;           // [kChunk, Kp] after the L2 norm if the rule has one; not scaled
  float* k = nullptr;           // [kChunk, Kp]; follows q, so both are one matrix of 2 kChunk rows
  // Without decay the next three are q, the erase keys and k.
  float* q_read = nullptr;        // [kChunk, Kp] q ⊙ prefix: multiplies the state before the chunk
  float* k_read = nullptr;        // [kChunk, Kp] erase keys ⊙ prefix
  float* k_write = nullptr;       // [kChunk, Kp] k ⊙ suffix: enters the state after the chunk
  ChunkDecay decay;               // allocated only if the rule has a decay
  float* k_transposed = nullptr;  // panels of [Kp, kPanel] that cover kChunk tokens
  // [2 kChunk, kChunk]: P_rj = Σ_i q_ri k_ji Π_{j<t≤r} e^{g_ti}, then L, which has the erase keys in place of q. Only
  // j ≤ r of P and j < r of L are valid.
  float* scores = nullptr;
  float* q_factor = nullptr;  // [kChunk] of the L2 norm
  float* k_factor = nullptr;  // [kChunk]
  float* beta = nullptr;      // [kChunk]
  float* lambda = nullptr;    // [kChunk] ‖k‖², with two keys κᵀk
  float* erase = nullptr;     // [kChunk] a
  float* write = nullptr;     // [kChunk] b

  void lay_out(Arena& arena, const DeltaShape& shape, Decay kind) {
    key_stride = round_up(shape.key_dim, kPanel);
    q = q_read = arena.floats((kTwoKeys ? 3 : 2) * kChunk * key_stride);
    k = k_read = k_write = q + kChunk * key_stride;
    if constexpr (kTwoKeys) k_read = erase_keys();
    if (kind != Decay::none) {
      for (float** rows : {&q_read, &k_read, &k_write}) *rows = arena.floats(kChunk * key_stride);
      decay.lay_out(arena, kind, key_stride);
    }
    k_transposed = arena.floats(round_up(kChunk, kPanel) * key_stride);
    scores = arena.floats(2 * kChunk * kChunk);
    for (float** row : {&q_factor, &k_factor, &beta, &lambda, &erase, &write}) *row = arena.floats(kChunk);
  }

  // Returns the erase keys [kChunk, Kp], times the factors of the L2 norm: κ, which follows k, or k itself.
  float* erase_keys() const { return kTwoKeys ? k + kChunk * key_stride : k; }

  const float* p_scores() const { return scores; }
  const float* l_scores() const { return scores + kChunk * kChunk; }
};

// Divides a row by √(Σx² + ε) and returns the factor.
HWY_INLINE float l2_normalise(float* row, std::int64_t padded) {
  const FloatTag d;
  const float factor = 1.0F / std::sqrt(dot(row, row, padded) + static_cast<float>(kL2NormEpsilon));
  for (std::int64_t i = 0; i < padded; i += kLanes)
    hn::Store(hn::Mul(hn::Load(d, row + i), hn::Set(d, factor)), d, row + i);
  return factor;
}

// Returns an upper bound on the number of addresses that plan_prefetches adds.
inline std::int64_t prefetch_addresses(const DeltaShape& shape) {
  constexpr std::int64_t kKeyRows = kTwoKeys ? 4 : 3;
  return PrefetchList::of_rows(kChunk, shape.key_dim) * kKeyRows + PrefetchList::of_rows(kChunk, shape.value_dim) * 2;
}

// Plans prefetches of the chunk at `next`: its rows of q, the keys and, with a channel gate, g, and the columns [first,
// last) of v and o. The rows of o will be written, but they also come from memory first.
template <class T, class Prefetches>
HWY_INLINE void plan_prefetches(const DeltaForward<T>& p, const ChunkPlace& next, std::int64_t first, std::int64_t last,
                                Prefetches& prefetches) {
  prefetches.clear();
  if (next.tokens <= 0) return;
  const std::int64_t i_b = next.i_b, t = next.start, tokens = next.tokens, key_dim = p.shape.key_dim;
  const MicroSteps::Tokens read = next.read(), decayed = next.decayed();
  if (p.rule.decay == Decay::channel && p.g.stride[3] == 1) {
    prefetches.add(p.g.at(i_b, decayed.first, next.i_h), p.g.stride[1], decayed.count(), key_dim);
  }
  if (p.q.stride[3] == 1) {
    prefetches.add(p.q.at(i_b, read.first, next.i_q), p.q.stride[1], read.count(), key_dim);
  }
  if (p.k.stride[3] == 1) prefetches.add(p.k.at(i_b, t, next.i_q), p.k.stride[1], tokens, key_dim);
  if constexpr (kTwoKeys) {
    const auto& keys = p.erase_key;
    if (keys.stride[3] == 1) prefetches.add(keys.at(i_b, t, next.i_q), keys.stride[1], tokens, key_dim);
  }
  if (p.v.stride[3] == 1) prefetches.add(p.v.at(i_b, t, next.i_h, first), p.v.stride[1], tokens, last - first);
  if (p.o.stride[3] == 1) {
    prefetches.add(p.o.at(i_b, read.first, next.i_h, first), p.o.stride[1], read.count(), last - first);
  }
}

// Returns the rows of a chunk of v or dv, which has one row per step.
HWY_INLINE MicroSteps::Tokens step_rows(const ChunkPlace& at) { return {at.start, at.start + at.tokens, 1, -at.start}; }

// Copies rows of a chunk of v or dout [B, T, HV, V], columns [first, last), times `factor` to panels [kChunk, kPanel].
// `rows`: step_rows or at.read(); other rows of the panels stay as they are.
template <class T>
HWY_INLINE void load_values(const View<const T, 4>& view, const ChunkPlace& at, const MicroSteps::Tokens& rows,
                            std::int64_t first, std::int64_t last, float factor, float* panels) {
  for (std::int64_t t = rows.first; t < rows.last; ++t) {
    for (std::int64_t v = first; v < last; v += kPanel) {
      float* row = panels + v * kChunk + rows.step_row(t) * kPanel;
      load_row(view.at(at.i_b, t, at.i_h, v), view.stride[3], std::min(kPanel, last - v), kPanel, row);
      if (factor != 1.0F) {
        for (std::int64_t j = 0; j < kPanel; ++j) row[j] *= factor;
      }
    }
  }
}

// Copies such panels, times `factor`, to rows of o or dv [B, T, HV, V].
template <class T>
HWY_INLINE void store_values(const float* panels, const ChunkPlace& at, const MicroSteps::Tokens& rows,
                             std::int64_t first, std::int64_t last, float factor, const View<T, 4>& view) {
  for (std::int64_t t = rows.first; t < rows.last; ++t) {
    for (std::int64_t v = first; v < last; v += kPanel) {
      store_row(panels + v * kChunk + rows.step_row(t) * kPanel, factor, std::min(kPanel, last - v),
                view.at(at.i_b, t, at.i_h, v), view.stride[3]);
    }
  }
}

// Computes a and b of a chunk's tokens from β and λ.
HWY_INLINE void compute_gains(std::int64_t tokens, const StepSize& step, ChunkScratch& s) {
  compute_gains(tokens, step, s.beta, s.lambda, s.erase, s.write);
}

// Copies rows of a chunk of q or keys [B, T, H, K] to [kChunk, Kp].
template <class T>
HWY_INLINE void load_key_rows(const View<const T, 4>& view, const ChunkPlace& at, std::int64_t dim, std::int64_t padded,
                              float* HWY_RESTRICT rows) {
  const FloatTag d;
  const T* HWY_RESTRICT from = view.at(at.i_b, at.start, at.i_q);
  const std::int64_t next = view.stride[1], tokens = at.tokens;
  if (view.stride[3] != 1 || dim != padded) {
    for (std::int64_t r = 0; r < tokens; ++r) load_row(from + r * next, view.stride[3], dim, padded, rows + r * padded);
    return;
  }
  for (std::int64_t r = 0; r < tokens; ++r, from += next, rows += padded) {
    for (std::int64_t i = 0; i < padded; i += kPanel) {
      hn::Store(load(d, from + i), d, rows + i);
      hn::Store(load(d, from + i + kLanes), d, rows + i + kLanes);
    }
  }
}

// Copies rows of a chunk of q to [kChunk, Kp], with zeros for the steps that are not read.
template <class T>
HWY_INLINE void load_queries(const View<const T, 4>& q, const ChunkPlace& at, std::int64_t dim, std::int64_t padded,
                             float* rows) {
  if (at.steps.n == 1) return load_key_rows(q, at, dim, padded, rows);
  std::fill_n(rows, at.tokens * padded, 0.0F);
  const MicroSteps::Tokens read = at.read();
  for (std::int64_t t = read.first; t < read.last; ++t) {
    load_row(q.at(at.i_b, t, at.i_q), q.stride[3], dim, padded, rows + read.step_row(t) * padded);
  }
}

// Computes the decays of a chunk's steps, e^g, and 1 for the steps of a token after its first.
template <class Problem>
HWY_INLINE void load_decays(const Problem& p, const ChunkPlace& at, ChunkScratch& s) {
  if (p.rule.decay == Decay::none) return;
  if (at.steps.n > 1) std::fill_n(s.decay.token, at.tokens * s.decay.key_stride, 1.0F);
  const MicroSteps::Tokens decayed = at.decayed();
  for (std::int64_t t = decayed.first; t < decayed.last; ++t) {
    load_decay(p.g.at(at.i_b, t, at.i_h), p.g.stride[3], p.shape.key_dim, decayed.step_row(t), s.decay);
  }
}

// Computes the products of the first `tokens` rows of two matrices [kChunk, Kp], and perhaps of up to three more rows.
// Without kTwoKeys both are `rows`.
HWY_INLINE void row_products(const float* rows, const float* others, std::int64_t tokens, std::int64_t padded,
                             float* out) {
  const FloatTag d;
  static_assert(kChunk % 4 == 0);
  for (std::int64_t r = 0; r < tokens; r += 4) {
    FloatVec sums[4];
    unroll<4>([&](auto n) EFLA_UNROLLED { sums[n] = hn::Zero(d); });
    for (std::int64_t i = 0; i < padded; i += kLanes) {
      unroll<4>([&](auto n) EFLA_UNROLLED {
        const FloatVec x = hn::Load(d, rows + (r + n) * padded + i);
        if constexpr (kTwoKeys) {
          sums[n] = hn::MulAdd(hn::Load(d, others + (r + n) * padded + i), x, sums[n]);
        } else {
          sums[n] = hn::MulAdd(x, x, sums[n]);
        }
      });
    }
    store_lane_sums(sums, out + r);
  }
}

// Computes row ← factor · row over a multiple of kLanes elements.
HWY_INLINE void scale_row(float* row, float factor, std::int64_t padded) {
  const FloatTag d;
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, row + i), hn::Set(d, factor)), d, row + i);
  }
}

// Loads q, the keys, β and the decays of a chunk, and applies the L2 norm if the rule has one.
template <class Problem>
HWY_INLINE void load_inputs(const Problem& p, const ChunkPlace& at, ChunkScratch& s) {
  const std::int64_t dim = p.shape.key_dim, stride = s.key_stride;
  load_queries(p.q, at, dim, stride, s.q);
  load_key_rows(p.k, at, dim, stride, s.k);
  for (std::int64_t r = 0; p.rule.qk_l2norm && r < at.tokens; ++r) {
    s.q_factor[r] = l2_normalise(s.q + r * stride, stride);
    s.k_factor[r] = l2_normalise(s.k + r * stride, stride);
  }
  if constexpr (kTwoKeys) {
    float* keys = s.erase_keys();
    load_key_rows(p.erase_key, at, dim, stride, keys);
    for (std::int64_t r = 0; p.rule.qk_l2norm && r < at.tokens; ++r) {
      scale_row(keys + r * stride, s.k_factor[r], stride);
    }
  }
  for (std::int64_t r = 0; r < at.tokens; ++r) s.beta[r] = to_float(p.beta(at.i_b, at.start + r, at.i_h));
  load_decays(p, at, s);
}

// Loads the same inputs and computes λ and the gains.
template <class Problem>
HWY_INLINE void load_chunk(const Problem& p, const ChunkPlace& at, ChunkScratch& s) {
  load_inputs(p, at, s);
  row_products(s.k, s.erase_keys(), at.tokens, s.key_stride, s.lambda);
  compute_gains(at.tokens, p.rule.step, s);
}

// Computes q_read, k_read and k_write, after load_chunk has filled q, the keys and the decays.
HWY_NOINLINE inline void apply_decay(std::int64_t tokens, ChunkScratch& s) {
  if (s.decay.kind == Decay::none) return;
  multiply_decays(tokens, s.decay);
  const std::int64_t count = tokens * s.key_stride;
  multiply_rows(s.q, s.decay.prefix, count, s.q_read);
  multiply_rows(s.erase_keys(), s.decay.prefix, count, s.k_read);
  multiply_rows(s.k, s.decay.suffix, count, s.k_write);
}

// Computes the gradient through y = x/√(Σx² + ε) in place: (dy − y (y·dy + others)) · factor. `others` are the products
// with their gradients of other rows that have the same factor.
HWY_INLINE void l2_normalise_bwd(const float* y, float factor, std::int64_t padded, float* dy,
                                 [[maybe_unused]] float others = 0.0F) {
  const FloatTag d;
  float product = dot(y, dy, padded);
  if constexpr (kTwoKeys) product += others;
  const FloatVec along = hn::Set(d, product);
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    const FloatVec across = hn::NegMulAdd(along, hn::Load(d, y + i), hn::Load(d, dy + i));
    hn::Store(hn::Mul(across, hn::Set(d, factor)), d, dy + i);
  }
}

// Finishes the backward of token r for a value head: computes dbeta from da and db, and adds to dk [Kp] the gradient
// through λ = ‖k‖². With kTwoKeys it adds to dk and to dκ, which is kChunk rows further, the gradients through κᵀk.
template <class T>
HWY_INLINE void finish_gains(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t r, float da, float db,
                             const ChunkScratch& c, const GainSlopes& slopes, float* dk) {
  const FloatTag d;
  const auto& step = p.rule.step;
  const float dalpha = static_cast<float>(step.erase_scale) * da + static_cast<float>(step.write_scale) * db;
  const float beta_unit = slopes.beta_unit[r], lambda_unit = slopes.lambda_unit[r];
  p.dbeta(at.i_b, at.start + r, at.i_h) = from_state<T>(dalpha * beta_unit * slopes.beta_slope[r] * beta_unit);
  if constexpr (kTwoKeys) {
    const FloatVec dmu = hn::Set(d, dalpha * slopes.lambda_slope[r] * lambda_unit), unit = hn::Set(d, lambda_unit);
    const float *k = c.k + r * c.key_stride, *erase_key = c.erase_keys() + r * c.key_stride;
    float* derase_key = dk + kChunk * c.key_stride;
    for (std::int64_t i = 0; i < c.key_stride; i += kLanes) {
      hn::Store(hn::MulAdd(dmu, hn::Mul(hn::Load(d, erase_key + i), unit), hn::Load(d, dk + i)), d, dk + i);
      hn::Store(hn::MulAdd(dmu, hn::Mul(hn::Load(d, k + i), unit), hn::Load(d, derase_key + i)), d, derase_key + i);
    }
    return;
  }
  const FloatVec twice_dlambda = hn::Set(d, 2.0F * dalpha * slopes.lambda_slope[r] * lambda_unit);
  const FloatVec unit = hn::Set(d, lambda_unit);
  const float* k = c.k + r * c.key_stride;
  for (std::int64_t i = 0; i < c.key_stride; i += kLanes) {
    hn::Store(hn::MulAdd(twice_dlambda, hn::Mul(hn::Load(d, k + i), unit), hn::Load(d, dk + i)), d, dk + i);
  }
}

// Finishes the backward of a token for a query head: applies the L2 norm to dq and dk [Kp] and stores them. With
// kTwoKeys also dκ, which is kChunk rows after dk.
template <class T>
HWY_INLINE void finish_keys(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t r, const ChunkScratch& c,
                            float* dq, float* dk) {
  float others = 0.0F;
  if constexpr (kTwoKeys) {
    float* derase_key = dk + kChunk * c.key_stride;
    others = dot(c.erase_keys() + r * c.key_stride, derase_key, c.key_stride);
    store_row(derase_key, p.rule.qk_l2norm ? c.k_factor[r] : 1.0F, p.shape.key_dim,
              p.derase_key.at(at.i_b, at.start + r, at.i_q), p.derase_key.stride[3]);
  }
  if (p.rule.qk_l2norm) {
    l2_normalise_bwd(c.q + r * c.key_stride, c.q_factor[r], c.key_stride, dq);
    l2_normalise_bwd(c.k + r * c.key_stride, c.k_factor[r], c.key_stride, dk, others);
  }
  if (at.steps.is_read(at.start + r)) {
    store_row(dq, 1.0F, p.shape.key_dim, p.dq.at(at.i_b, at.steps.token(at.start + r), at.i_q), p.dq.stride[3]);
  }
  store_row(dk, 1.0F, p.shape.key_dim, p.dk.at(at.i_b, at.start + r, at.i_q), p.dk.stride[3]);
}

// Computes rows of [Q; E] Kᵀ, where E has the erase keys: the first `columns` columns, or with 0 the columns up to the
// diagonal.
struct ScoreTiles {
  const ChunkScratch& s;
  std::int64_t key_dim;
  float* out;         // the scores of these rows, [·, kChunk]
  const float* rows;  // q or erase keys
  std::int64_t columns = 0;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    for (std::int64_t panel = 0; panel * kPanel < (columns > 0 ? columns : r + M); ++panel) {
      Tile<M> tile;
      tile.zero();
      tile.multiply_add(rows + r * s.key_stride, s.key_stride, 1, s.k_transposed + panel * kPanel * s.key_stride,
                        kPanel, key_dim);
      tile.store(out + r * kChunk + panel * kPanel, kChunk);
    }
  }
};

HWY_NOINLINE inline void multiply_scores(ScoreTiles tiles, std::int64_t rows) { for_tiles(rows, tiles); }

// Transposes rows [tokens, Kp] of keys into the panels s.k_transposed.
HWY_INLINE void transpose_keys(const float* keys, std::int64_t tokens, ChunkScratch& s) {
  for (std::int64_t first = 0; first < tokens; first += kPanel) {
    transpose(keys + first * s.key_stride, s.key_stride, std::min(kPanel, tokens - first), s.key_stride,
              s.k_transposed + first * s.key_stride, kPanel);
  }
}

// Computes P and L of a chunk with their decays, after load_chunk, and the rows q_read, k_read and k_write.
HWY_NOINLINE inline void compute_scores(const ChunkPlace& at, std::int64_t key_dim, ChunkScratch& s) {
  float* l_scores = s.scores + kChunk * kChunk;
  apply_decay(at.tokens, s);
  if (s.decay.kind != Decay::channel) {
    transpose_keys(s.k, at.tokens, s);
    multiply_scores({s, key_dim, s.scores, s.q}, at.tokens);
    multiply_scores({s, key_dim, l_scores, s.erase_keys()}, at.tokens);
    if (s.decay.kind == Decay::scalar) weigh_scores(at.tokens, s.decay, s.scores, l_scores);
    return;
  }
  // Rows of the second half with columns of the first are a product, with each side decayed to the boundary between the
  // halves. Inside of each half, pairs are computed one by one.
  const ChunkDecay& decay = s.decay;
  const std::int64_t rest = at.tokens - kHalfChunk;
  if (rest > 0) {
    const std::int64_t half = kHalfChunk * s.key_stride;
    multiply_rows(s.q + half, decay.half_prefix, rest * s.key_stride, decay.q_half);
    multiply_rows(s.erase_keys() + half, decay.half_prefix, rest * s.key_stride, decay.k_half);
    multiply_rows(s.k, decay.half_suffix, half, decay.k_tail);
    transpose_keys(decay.k_tail, kHalfChunk, s);
    multiply_scores({s, key_dim, s.scores + kHalfChunk * kChunk, decay.q_half, kHalfChunk}, rest);
    multiply_scores({s, key_dim, l_scores + kHalfChunk * kChunk, decay.k_half, kHalfChunk}, rest);
  }
  for (std::int64_t first = 0; first < at.tokens; first += kHalfChunk) {
    pair_scores(s.q, s.k, decay, first, std::min(first + kHalfChunk, at.tokens), s.scores, l_scores);
  }
}

// Computes rows r … of one panel of U by forward substitution: u_r = b_r v_r − a_r e_r with e_r = S̃_rᵀ κ_r =
// Sᵀ k_read_r + Σ_{i<r} L_ri u_i. `tile` holds the first term of e. All arrays are [kChunk, kPanel], except values,
// whose rows may be further apart.
template <bool kKeepErrors, int M, class T>
HWY_INLINE void substitute(Tile<M>& tile, const ChunkScratch& s, std::int64_t r, const T* values,
                           std::int64_t values_stride, float* u, float* errors) {
  const FloatTag d;
  const float* l = s.l_scores() + r * kChunk;
  tile.multiply_add(l, kChunk, 1, u, kPanel, r);
  unroll<M>([&](auto m) EFLA_UNROLLED {
    const FloatVec a = hn::Set(d, s.erase[r + m]);
    const FloatVec b = hn::Set(d, s.write[r + m]);
    const std::int64_t at = (r + m) * kPanel;
    const FloatVec e0 = tile.acc[m][0];
    const FloatVec e1 = tile.acc[m][1];
    if constexpr (kKeepErrors) {
      hn::Store(e0, d, errors + at);
      hn::Store(e1, d, errors + at + kLanes);
    }
    const T* value = values + (r + m) * values_stride;
    const FloatVec u0 = hn::NegMulAdd(a, e0, hn::Mul(b, load(d, value)));
    const FloatVec u1 = hn::NegMulAdd(a, e1, hn::Mul(b, load(d, value + kLanes)));
    hn::Store(u0, d, u + at);
    hn::Store(u1, d, u + at + kLanes);
    unroll<M - 1 - m>([&](auto i) EFLA_UNROLLED { tile.add(m + 1 + i, l[(m + 1 + i) * kChunk + r + m], u0, u1); });
  });
}

// Computes one panel of U.
template <bool kKeepErrors>
struct SubstitutionTiles {
  const ChunkScratch& s;
  std::int64_t key_dim;
  const float* state;   // [K, kPanel] before the chunk
  const float* values;  // [kChunk, kPanel]
  float* u;             // [kChunk, kPanel]
  float* errors;        // [kChunk, kPanel], e; written with kKeepErrors
  PrefetchList& prefetches;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    Tile<M> tile;
    tile.zero();
    tile.multiply_add(s.k_read + r * s.key_stride, s.key_stride, 1, state, kPanel, key_dim, prefetches);
    substitute<kKeepErrors>(tile, s, r, values, kPanel, u, errors);
  }
};

// Computes one panel of U from the first term of E, Sᵀ k_read.
template <bool kKeepErrors, class T = float>
struct ErrorSubstitutionTiles {
  const ChunkScratch& s;
  float* errors;                   // [kChunk, kPanel], the first term; with kKeepErrors e afterwards
  const T* values;                 // [kChunk, kPanel]
  float* u;                        // [kChunk, kPanel]
  const float* factors = nullptr;  // [kChunk] of the first term's rows; nullptr: ones
  std::int64_t values_stride = kPanel;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    Tile<M> tile;
    tile.load(errors + r * kPanel);
    if (factors != nullptr) tile.scale_rows(factors + r);
    substitute<kKeepErrors>(tile, s, r, values, values_stride, u, errors);
  }
};

// Computes S ← D S + K_writeᵀ U for one panel, with D the decays of the whole chunk.
struct StateTiles {
  const ChunkScratch& s;
  std::int64_t tokens;
  const float* u;  // [kChunk, kPanel]
  float* state;    // [K, kPanel]

  template <int M>
  HWY_INLINE void run(std::int64_t i) {
    Tile<M> tile;
    tile.load(state + i * kPanel);
    if (s.decay.whole != nullptr) tile.scale_rows(s.decay.whole + i);
    tile.multiply_add(s.k_write + i, 1, s.key_stride, u, kPanel, tokens);
    tile.store(state + i * kPanel);
  }
};

// Copies columns [first, last) of a state [K, V] to their panels in `panels`, which has all panels [K, kPanel] of the
// state. `first` is a multiple of kPanel. Fills with zeros up to the end of the last panel, or everywhere if there is
// no state. Copies row by row over all panels, because reading memory in its order is fastest.
template <int Rank, class Float, class... Index>
HWY_INLINE void load_state_panels(const View<Float, Rank>& view, std::int64_t first, std::int64_t last,
                                  std::int64_t key_dim, float* panels, Index... index) {
  for (std::int64_t i = 0; i < key_dim; ++i) {
    for (std::int64_t v = first; v < last; v += kPanel) {
      float* row = panels + v * key_dim + i * kPanel;
      if (view) {
        load_row(view.at(index..., i, v), view.stride[Rank - 1], std::min(kPanel, last - v), kPanel, row);
      } else {
        std::fill_n(row, kPanel, 0.0F);
      }
    }
  }
}

// Copies such panels to columns [first, last) of a state [K, V], if there is one.
template <int Rank, class... Index>
HWY_INLINE void store_state_panels(const float* panels, const View<float, Rank>& view, std::int64_t first,
                                   std::int64_t last, std::int64_t key_dim, Index... index) {
  if (!view) return;
  for (std::int64_t i = 0; i < key_dim; ++i) {
    for (std::int64_t v = first; v < last; v += kPanel) {
      store_row(panels + v * key_dim + i * kPanel, 1.0F, std::min(kPanel, last - v), view.at(index..., i, v),
                view.stride[Rank - 1]);
    }
  }
}

// Returns whether the saved states of a forward are too large to stay in the caches until the backward reads them. Such
// states are written past the caches, because an ordinary store would first read the lines.
template <class T>
bool streams_states(const DeltaForward<T>& p) {
  constexpr std::int64_t kBytes = 8 << 20;
  return p.chunk_states && p.chunk_states.size() * static_cast<std::int64_t>(sizeof(State<T>)) >= kBytes;
}

// Stores the state before a chunk like store_state_panels. With `streams` aligned rows are written past the caches, and
// the caller must end with hwy::FlushStream().
template <class... Index>
HWY_INLINE void store_chunk_state(const float* panels, const View<float, 5>& view, bool streams, std::int64_t first,
                                  std::int64_t last, std::int64_t key_dim, Index... index) {
  const FloatTag d;
  const auto aligned = [&](std::int64_t i) HWY_ATTR {
    return reinterpret_cast<std::uintptr_t>(view.at(index..., i, first)) % (kLanes * sizeof(float)) == 0;
  };
  if (!streams || view.stride[4] != 1 || (last - first) % kPanel != 0 || !aligned(0) || !aligned(1)) {
    return store_state_panels(panels, view, first, last, key_dim, index...);
  }
  for (std::int64_t i = 0; i < key_dim; ++i) {
    float* to = view.at(index..., i, first);
    for (std::int64_t v = first; v < last; v += kPanel, to += kPanel) {
      const float* row = panels + v * key_dim + i * kPanel;
      for (std::int64_t j = 0; j < kPanel; j += kLanes) hn::Stream(hn::Load(d, row + j), d, to + j);
    }
  }
}

}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
