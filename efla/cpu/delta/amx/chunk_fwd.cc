// The forward of the chunk algorithm (chunk_fwd.cc) with its matrix products on AMX (amx/bf16_split-inl.h). The
// substitution, the gains and the decays, which are no matrix products, run on AVX-512. A task has some value heads of
// a sequence, or a slice of their value columns (head_range.h), and computes them chunk by chunk, within a chunk head
// by head, and within a head panel by panel of value columns. docs/design/2026-11-amx.md explains the design.
#include "efla/cpu/delta/amx/amx.h"

#include <cmath>

#include "efla/cpu/common/head_range.h"
#include "efla/cpu/common/target.h"
#include "efla/cpu/delta/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/delta/amx/chunk_fwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/delta/chunk-inl.h"

#if HWY_TARGET == HWY_AVX3 && !defined(EFLA_NO_AMX)
#include "efla/cpu/delta/amx/decayed_keys-inl.h"
#include "efla/cpu/delta/amx/fading-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// The range of scales that may multiply queries. With a smaller scale AMX might take scaled queries for 0.
constexpr float kSmallestQueryScale = 0x1p-20F, kLargestQueryScale = 0x1p20F;
// Numbers of greater size may round to infinity in bfloat16.
constexpr float kLargestSplit = 0x1.fp127F;

// Factors of the rows of a chunk, each [kChunk], from the L2 norm and a scalar gate. The factors multiply sums and
// updates instead of keys, so that keys stay exact in one split. With a channel gate the keys themselves are normalised
// and decayed.
//
// With c_r = d_0 … d_r and d = c_last, the decay between tokens j and r is c_r / c_j, so c is a factor of rows only:
// with U' = U ⊘ c, E = c ⊙ (K S + stril(K Kᵀ) U'), O = c ⊙ (Q S + tril(Q Kᵀ) U') and S ← d (S + Kᵀ U'). If c leaves the
// bounds within which nothing overflows or underflows (`divided` is false), L and P get the decays between their tokens
// one by one, P is multiplied by U, and Kᵀ by U times the decays to the end of the chunk.
struct RowFactors {
  float* k_norm = nullptr;   // of k's rows in L and P; only if not `divided`
  float* q_norm = nullptr;   // of q's rows in P; only if not `divided`
  float* k_read = nullptr;   // of the rows of K S and, if `divided`, of L
  float* q_read = nullptr;   // of the rows of O; if not `divided`, of Q S
  float* k_write = nullptr;  // of the rows of U and, if `divided`, of the columns of L
};

struct FwdScratch {
  ChunkScratch chunk;
  RowFactors factors;  // used if `scaled`
  bool scaled = false;
  bool divided = false;    // whether c divides U or, with a channel gate, keys
  float* state = nullptr;  // panels [K, kPanel]
  // query_scale is the scale and out_scale is 1 if queries are float32 and the scale is within the bounds above;
  // otherwise the other way round.
  float query_scale = 1.0F, out_scale = 1.0F;
  // Factors of the rows of queries when they are split, and of the rows of outputs when they are stored.
  float *query_factors = nullptr, *out_factors = nullptr;
  float* values = nullptr;      // [kChunk, kPanel] V, if the caller's own rows cannot be used
  float* out = nullptr;         // [kChunk, kPanel] O, likewise
  float* u = nullptr;           // [kChunk, kPanel]
  float* errors = nullptr;      // [kChunk, kPanel] K_read S
  float* non_finite = nullptr;  // [kChunk, kPanel] the non-finite elements of U
  float* weights = nullptr;     // [kChunk] weights of the squares of rows of K S (fading-inl.h)
  SplitTiles reads;             // left: K_read, then Q_read
  SplitTiles keys;              // right: Kᵀ, columns are tokens
  SplitTiles writes;            // left: K_writeᵀ, the depth is tokens
  SplitTiles write_keys;        // left: K_write; only with a channel gate
  SplitTiles p_scores;          // left
  SplitTiles state_splits;      // right: one panel of S
  SplitTiles u_splits;          // right: one panel of U
  SplitTiles u_writes;          // right: the operand that multiplies Kᵀ, if it is not u_splits
  RowPrefetches prefetches;

  bool has_scalar() const { return chunk.decay.kind == Decay::scalar; }
  bool weighed() const { return scaled && !divided; }

  void lay_out(Arena& arena, const DeltaShape& shape, Decay decay, std::int64_t heads, int splits) {
    chunk.lay_out(arena, shape, decay);
    RowFactors& f = factors;
    for (float** row : {&query_factors, &out_factors, &f.k_norm, &f.q_norm, &f.k_read, &f.q_read, &f.k_write, &weights})
      *row = arena.floats(kChunk);
    const std::int64_t padded_values = round_up(shape.value_dim, kPanel), depth = shape.key_dim / kTileDepth;
    state = arena.floats(heads * shape.key_dim * padded_values);
    for (float** panel : {&values, &out, &u, &errors, &non_finite}) *panel = arena.floats(kChunk * kPanel);
    reads.lay_out(arena, splits, 4, depth);
    keys.lay_out(arena, splits, 2, depth);
    writes.lay_out(arena, splits, 2 * depth, 1);
    if (decay == Decay::channel) write_keys.lay_out(arena, splits, 2, depth);
    p_scores.lay_out(arena, splits, 2, 1);
    state_splits.lay_out(arena, splits, 2, depth);
    u_splits.lay_out(arena, splits, 2, 1);
    u_writes.lay_out(arena, splits, 2, 1);
  }
};

// Loads 32 elements of a row of keys or queries.
template <class T>
HWY_INLINE void load_key(const T* row, std::int64_t stride, FloatVec& x0, FloatVec& x1) {
  const FloatTag d;
  if (stride == 1) {
    x0 = load(d, row);
    x1 = load(d, row + kLanes);
  } else {
    HWY_ALIGN float gathered[kTileDepth];
    load_row(row, stride, kTileDepth, kTileDepth, gathered);
    x0 = hn::Load(d, gathered);
    x1 = hn::Load(d, gathered + kLanes);
  }
}

// Splits rows of keys or queries, times their factors if they are float32 and have any, into rows of left tiles from
// `first` on, with zeros after the last token.
template <int kKeySplits, class T>
HWY_INLINE void split_tokens(const View<const T, 4>& view, const ChunkPlace& at, std::int64_t first,
                             [[maybe_unused]] const float* factors, SplitTiles reads) {
  const FloatTag d;
  const std::int64_t stride = view.stride[3], split_stride = reads.split_stride();
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    const T* row = view.at(at.i_b, at.start + r, at.i_q);
    Bf16Bits* to = reads.row(first + r, 0);
    for (std::int64_t along = 0; along < reads.depth; ++along, row += kTileDepth * stride, to += kTileElements) {
      FloatVec x0, x1;
      load_key(row, stride, x0, x1);
      if constexpr (std::is_same_v<T, float>) {
        if (factors != nullptr) {
          x0 = hn::Mul(x0, hn::Set(d, factors[r]));
          x1 = hn::Mul(x1, hn::Set(d, factors[r]));
        }
      }
      split_pairs<kKeySplits>(x0.raw, x1.raw, to, split_stride);
    }
  }
  clear_rows<kKeySplits>(first + at.tokens, first + kChunk, reads);
}

// Computes the gains of a chunk, and the factors of the L2 norm. ‖k‖² must be in lambda.
template <class T>
HWY_INLINE void load_gains(const DeltaForward<T>& p, const ChunkPlace& at, ChunkScratch& c) {
  const FloatTag d;
  const std::int64_t stride = p.q.stride[3];
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    const std::int64_t t = at.start + r;
    c.beta[r] = to_float(p.beta(at.i_b, t, at.i_h));
    if (!p.rule.qk_l2norm) continue;
    const T* q = p.q.at(at.i_b, t, at.i_q);
    FloatVec sum = hn::Zero(d), x0, x1;
    for (std::int64_t i = 0; i < p.shape.key_dim; i += kTileDepth) {
      load_key(q + i * stride, stride, x0, x1);
      sum = hn::MulAdd(x0, x0, hn::MulAdd(x1, x1, sum));
    }
    c.q_factor[r] = 1.0F / std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)) + static_cast<float>(kL2NormEpsilon));
    c.k_factor[r] = 1.0F / std::sqrt(c.lambda[r] + static_cast<float>(kL2NormEpsilon));
    c.lambda[r] *= c.k_factor[r] * c.k_factor[r];
  }
  compute_gains(at.tokens, p.rule.step, c);
}

// Computes the decays of a scalar gate, e^g, in whole vectors of float64 like the gains.
template <class T>
HWY_INLINE void load_scalar_decays(const DeltaForward<T>& p, const ChunkPlace& at, double* decays) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> d32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  HWY_ALIGN float g[kChunk] = {};
  for (std::int64_t r = 0; r < at.tokens; ++r) g[r] = p.g(at.i_b, at.start + r, at.i_h, std::int64_t{0});
  for (std::int64_t r = 0; r < at.tokens; r += lanes) {
    const auto x = hn::PromoteTo(d, hn::Load(d32, g + r));
    // Beyond these bounds e^x is 0 or infinite in float32, and Highway's exp is not defined.
    const auto bounded = hn::Clamp(x, hn::Set(d, -700.0), hn::Set(d, 700.0));
    hn::Store(hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, bounded)), d, decays + r);
  }
}

// Computes the factors of rows from the factors of the norm and of a scalar gate.
template <class T>
HWY_INLINE void compute_factors(const DeltaForward<T>& p, const ChunkPlace& at, FwdScratch& s) {
  const ChunkScratch& c = s.chunk;
  RowFactors& f = s.factors;
  const std::int64_t tokens = at.tokens;
  HWY_ALIGN double decay[kChunk], product[kChunk];
  if (s.has_scalar()) {
    load_scalar_decays(p, at, decay);
  } else {
    std::fill_n(decay, kChunk, 1.0);
  }
  double before = 1.0, least = 1.0, most = 1.0;
  for (std::int64_t r = 0; r < tokens; ++r) {
    product[r] = before *= decay[r];
    least = std::min(least, before);
    most = std::max(most, before);
  }
  s.divided = least >= kSmallestDivisor && most <= kLargestDivisor && !std::isnan(before);
  double after = 1.0;
  for (std::int64_t r = tokens - 1; r >= 0; --r) {
    const float k_norm = p.rule.qk_l2norm ? c.k_factor[r] : 1.0F;
    const float q_norm = s.query_scale * (p.rule.qk_l2norm ? c.q_factor[r] : 1.0F);
    f.k_norm[r] = k_norm;
    f.q_norm[r] = q_norm;
    f.k_read[r] = static_cast<float>(product[r] * k_norm);
    f.q_read[r] = static_cast<float>(product[r] * q_norm);
    f.k_write[r] = static_cast<float>(s.divided ? k_norm / product[r] : k_norm * after);
    after *= decay[r];
  }
  for (float* row : {f.k_norm, f.q_norm, f.k_read, f.q_read, f.k_write}) std::fill(row + tokens, row + kChunk, 0.0F);
  for (std::int64_t r = 0; r < kChunk; ++r) {
    const float factor = s.divided ? f.q_read[r] : 1.0F;
    if constexpr (std::is_same_v<T, float>) {
      s.query_factors[r] = factor;
    } else {
      s.out_factors[r] = s.out_scale * factor;
    }
  }
  if (s.has_scalar()) std::fill_n(c.decay.whole, c.key_stride, static_cast<float>(before));
  if (s.divided) return;
  HWY_ALIGN float rounded[kChunk];
  std::copy_n(decay, tokens, rounded);
  multiply_weights(tokens, rounded, 1, c.decay.weights);
}

// Multiplies 32 rows of reads from `block` on by Kᵀ, without the block above the diagonal.
template <int kKeySplits>
HWY_INLINE void multiply_keys(std::int64_t block, FwdScratch& s, float* scores) {
  zero_sums();
  add_products<kKeySplits, kKeySplits, Product::lower>(s.reads, block, s.keys, 0, s.prefetches);
  store_sums(scores, kChunk);
}

// Loads q, k and the gains of a chunk with a channel gate, splits keys and queries, and computes P and L.
template <int kKeySplits, class T>
HWY_INLINE void load_decayed_keys(const DeltaForward<T>& p, const ChunkPlace& at, FwdScratch& s) {
  ChunkScratch& c = s.chunk;
  load_chunk(p, at, c);
  if (s.query_scale != 1.0F) {
    for (std::int64_t i = 0; i < at.tokens * c.key_stride; ++i) c.q[i] *= s.query_scale;
  }
  s.divided = split_decayed_keys<kKeySplits>(at, p.shape.key_dim, c, s.reads, s.write_keys);
  transpose_rows<kKeySplits>(s.write_keys, 0, s.keys, 0, s.keys.depth);
  if (s.divided) {
    multiply_keys<kKeySplits>(0, s, c.scores + kChunk * kChunk);
    multiply_keys<kKeySplits>(2, s, c.scores);
  }
  transpose_columns<kKeySplits>(s.keys, s.writes);
}

// Does the same without a channel gate. A matrix is split just before it is multiplied, because the first-level cache
// holds little more. ‖k‖² is the diagonal of K Kᵀ.
template <int kKeySplits, class T>
HWY_INLINE void load_plain_keys(const DeltaForward<T>& p, const ChunkPlace& at, FwdScratch& s) {
  ChunkScratch& c = s.chunk;
  float* l_scores = c.scores + kChunk * kChunk;
  split_tokens<kKeySplits>(p.k, at, 0, nullptr, s.reads);
  transpose_rows<kKeySplits>(s.reads, 0, s.keys, 0, s.keys.depth);
  multiply_keys<kKeySplits>(0, s, l_scores);
  for (std::int64_t r = 0; r < at.tokens; ++r) c.lambda[r] = l_scores[r * (kChunk + 1)];
  load_gains(p, at, c);
  if (s.scaled) compute_factors(p, at, s);
  split_tokens<kKeySplits>(p.q, at, kChunk, s.query_factors, s.reads);
  multiply_keys<kKeySplits>(2, s, c.scores);
  transpose_columns<kKeySplits>(s.keys, s.writes);
}

// Loads q, k, gains and decays of a chunk, splits its keys and computes P and L; rows after the last token are zero.
template <int kKeySplits, class T>
HWY_NOINLINE void load_keys(const DeltaForward<T>& p, const ChunkPlace& at, FwdScratch& s) {
  ChunkScratch& c = s.chunk;
  if (p.rule.decay == Decay::channel) {
    if constexpr (kKeySplits > 1) load_decayed_keys<kKeySplits>(p, at, s);
  } else {
    if constexpr (kKeySplits != 2) load_plain_keys<kKeySplits>(p, at, s);
  }
  for (float* gains : {c.erase, c.write}) std::fill(gains + at.tokens, gains + kChunk, 0.0F);
}

// Multiplies P and L by their factors, sets P to zero above the diagonal, and splits P.
template <int kSplits>
HWY_NOINLINE void finish_scores(std::int64_t tokens, FwdScratch& s) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  const RowFactors& f = s.factors;
  float* l_scores = c.scores + kChunk * kChunk;
  for (std::int64_t r = 0; r < kChunk; ++r) {
    const std::int64_t count = r < tokens ? r + 1 : 0;
    for (std::int64_t j = 0; j < kChunk; j += kLanes) {
      const auto past = hn::FirstN(d, static_cast<std::size_t>(std::clamp<std::int64_t>(count - j, 0, kLanes)));
      const std::int64_t i = r * kChunk + j;
      FloatVec p = hn::Load(d, c.scores + i);
      const FloatVec l = hn::Load(d, l_scores + i);
      if (s.scaled && s.divided) {
        const FloatVec column = hn::Load(d, f.k_write + j);
        hn::Store(hn::Mul(hn::Mul(l, column), hn::Set(d, f.k_read[r])), d, l_scores + i);
      } else if (s.scaled) {
        const FloatVec column = hn::Mul(hn::Load(d, f.k_norm + j), hn::Load(d, c.decay.weights + i));
        p = hn::Mul(p, hn::Mul(column, hn::Set(d, f.q_norm[r])));
        hn::Store(hn::Mul(l, hn::Mul(column, hn::Set(d, f.k_norm[r]))), d, l_scores + i);
      }
      hn::Store(hn::IfThenElseZero(past, p), d, c.scores + i);
    }
  }
  split_rows<kSplits>(c.scores, kChunk, 0, kChunk, s.p_scores);
}

// Splits one panel of S, and computes S ← D S unless the chunk is `divided`; panel_chunk then multiplies by D at the
// end.
template <int kSplits>
HWY_INLINE void split_state(std::int64_t key_dim, float* state, FwdScratch& s) {
  const float* whole = s.divided ? nullptr : s.chunk.decay.whole;
  const SplitTiles splits = s.state_splits;
  const std::int64_t stride = splits.split_stride();
  constexpr std::int64_t kPair = kTileRows * kPanel;  // from a row to the other row of its pair
  for (std::int64_t along = 0; along < key_dim / kTileDepth; ++along) {
    for (std::int64_t i = 0; i < kTileRows; ++i) {
      const std::int64_t row = along * kTileDepth + i;
      for (std::int64_t column = 0; column < 2; ++column) {
        float* at = state + row * kPanel + column * kTileRows;
        const __m512 x0 = _mm512_load_ps(at), x1 = _mm512_load_ps(at + kPair);
        split_pairs<kSplits>(x0, x1, splits.tile(0, column, along) + i * kTileDepth, stride);
        if (whole == nullptr) continue;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_set1_ps(whole[row]), x0));
        _mm512_store_ps(at + kPair, _mm512_mul_ps(_mm512_set1_ps(whole[row + kTileRows]), x1));
      }
    }
  }
}

// Splits the panel of U. If `divided`, U is first multiplied by k_write, which gives U'. If `weighed`, U times k_write
// is split as well. Returns whether all elements are finite in bfloat16.
template <int kSplits>
HWY_INLINE bool split_updates(FwdScratch& s) {
  const __m512 largest = _mm512_set1_ps(kLargestSplit);
  __mmask16 non_finite = 0;
  const SplitTiles splits = s.u_splits, writes = s.u_writes;
  const std::int64_t stride = splits.split_stride();
  constexpr std::int64_t kPair = kTileRows * kPanel;
  for (std::int64_t r = 0; r < kTileRows; ++r) {
    for (std::int64_t column = 0; column < 2; ++column) {
      const float* from = s.u + r * kPanel + column * kTileRows;
      const __m512 f0 = _mm512_set1_ps(s.factors.k_write[r]), f1 = _mm512_set1_ps(s.factors.k_write[r + kTileRows]);
      __m512 x0 = _mm512_load_ps(from), x1 = _mm512_load_ps(from + kPair);
      if (s.scaled && s.divided) {
        x0 = _mm512_mul_ps(f0, x0);
        x1 = _mm512_mul_ps(f1, x1);
      }
      non_finite |= _mm512_cmp_ps_mask(_mm512_abs_ps(x0), largest, _CMP_NLE_UQ);
      non_finite |= _mm512_cmp_ps_mask(_mm512_abs_ps(x1), largest, _CMP_NLE_UQ);
      split_pairs<kSplits>(x0, x1, splits.tile(0, column, 0) + r * kTileDepth, stride);
      if (!s.weighed()) continue;
      split_pairs<kSplits>(_mm512_mul_ps(f0, x0), _mm512_mul_ps(f1, x1), writes.tile(0, column, 0) + r * kTileDepth,
                           stride);
    }
  }
  return non_finite == 0;
}

// Handles updates for which split_updates returns false: P U would add 0 times the updates of later tokens, which may
// be NaN. Moves elements of U that are non-finite or too large to s.non_finite and sets them to zero in u_splits.
// u_writes gets all of U.
template <int kSplits>
HWY_NOINLINE void isolate_non_finite(FwdScratch& s) {
  if (s.scaled && s.divided) scale_rows(s.u, s.factors.k_write, s.u);
  if (!s.weighed()) {  // otherwise u_splits is used for both
    for (int split = 0; split < kSplits; ++split) {
      std::copy_n(s.u_splits.tile(split, 0, 0), 2 * kTileElements, s.u_writes.tile(split, 0, 0));
    }
  }
  HWY_ALIGN float finite[kChunk * kPanel];
  for (std::int64_t i = 0; i < kChunk * kPanel; ++i) {
    const bool non_finite = !(std::abs(s.u[i]) <= kLargestSplit);
    s.non_finite[i] = non_finite ? s.u[i] : 0.0F;
    finite[i] = non_finite ? 0.0F : s.u[i];
  }
  for (std::int64_t r = 0; r < kTileRows; ++r) {
    for (std::int64_t column = 0; column < 2; ++column) {
      const float* from = finite + r * kPanel + column * kTileRows;
      split_pairs<kSplits>(_mm512_load_ps(from), _mm512_load_ps(from + kTileRows * kPanel),
                           s.u_splits.tile(0, column, 0) + r * kTileDepth, s.u_splits.split_stride());
    }
  }
}

// Adds to O the product of P with the elements in s.non_finite. A row of O gets only the tokens up to this row.
struct NonFiniteUpdateTiles {
  const FwdScratch& s;
  float* out;  // [kChunk, kPanel]

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const float* p = s.chunk.p_scores() + r * kChunk;
    Tile<M> tile;
    tile.load(out + r * kPanel);
    tile.multiply_add(p, kChunk, 1, s.non_finite, kPanel, r);
    tile.multiply_add_lower(p + r, kChunk, s.non_finite + r * kPanel);
    tile.store(out + r * kPanel);
  }
};

// Computes one panel of U. Reads V from the caller's rows if they fill the panel. With kKeepErrors s.errors is replaced
// by E.
template <bool kKeepErrors, class T>
HWY_INLINE void substitute_panel(const DeltaForward<T>& p, const ChunkPlace& at, std::int64_t v, std::int64_t columns,
                                 FwdScratch& s) {
  const float* factors = s.scaled ? s.factors.k_read : nullptr;
  if (at.tokens == kChunk && columns == kPanel && p.v.stride[3] == 1) {
    ErrorSubstitutionTiles<kKeepErrors, T> substitution{s.chunk, s.errors, p.v.at(at.i_b, at.start, at.i_h, v),
                                                        s.u,     factors,  p.v.stride[1]};
    return for_tiles(kChunk, substitution);
  }
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    load_row(p.v.at(at.i_b, at.start + r, at.i_h, v), p.v.stride[3], columns, kPanel, s.values + r * kPanel);
  }
  std::fill_n(s.values + at.tokens * kPanel, (kChunk - at.tokens) * kPanel, 0.0F);
  ErrorSubstitutionTiles<kKeepErrors> substitution{s.chunk, s.errors, s.values, s.u, factors};
  for_tiles(kChunk, substitution);
}

// Stores the panel of O that is in the tile registers. Unless `ordinary`, first adds the elements in s.non_finite.
template <class T>
HWY_INLINE void store_output(const DeltaForward<T>& p, const ChunkPlace& at, std::int64_t v, std::int64_t columns,
                             bool ordinary, FwdScratch& s) {
  if constexpr (std::is_same_v<T, float>) {
    if (ordinary && at.tokens == kChunk && columns == kPanel && p.o.stride[3] == 1 && s.out_scale == 1.0F) {
      return store_sums(p.o.at(at.i_b, at.start, at.i_h, v), p.o.stride[1]);
    }
  }
  store_sums(s.out, kPanel);
  if (!ordinary) {
    NonFiniteUpdateTiles non_finite{s, s.out};
    for_tiles(kChunk, non_finite);
  }
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    store_row(s.out + r * kPanel, s.out_factors[r], columns, p.o.at(at.i_b, at.start + r, at.i_h, v), p.o.stride[3]);
  }
}

// Computes one chunk of the panel at column v: its outputs and its next state. Returns false and writes neither if two
// splits are too few (fading-inl.h). Chunks with a channel gate, and chunks with a scalar gate that are not `divided`,
// are not checked, because S has already been replaced by D S.
template <int kSplits, int kKeySplits, class T>
HWY_NOINLINE bool panel_chunk(const DeltaForward<T>& p, const ChunkPlace& at, std::int64_t v, std::int64_t columns,
                              FwdScratch& s) {
  constexpr bool kChecks = kSplits == 2 && kKeySplits == 1;
  const std::int64_t key_dim = p.shape.key_dim;
  const float* whole = s.chunk.decay.whole;
  float* state = s.state + v * key_dim;
  split_state<kSplits>(key_dim, state, s);
  zero_sums();
  add_products<kKeySplits, kSplits>(s.reads, 0, s.state_splits, 0, s.prefetches);
  store_sums(s.errors, kPanel);
  // Q_read S stays in the tile registers and is computed while the substitution runs.
  zero_sums();
  add_products<kKeySplits, kSplits>(s.reads, 2, s.state_splits, 0, s.prefetches);
  if (s.weighed()) {
    store_sums(s.out, kPanel);
    scale_rows(s.out, s.factors.q_read, s.out);
    load_sums(s.out, kPanel);
  }
  [[maybe_unused]] const float before = kChecks ? norm_before(s.errors, s.weights) : 0.0F;
  substitute_panel<kChecks>(p, at, v, columns, s);
  if constexpr (kChecks) {
    if ((whole == nullptr || s.divided) && leaves_little(s.errors, s.u, at.tokens - 1, s.chunk.lambda, before))
      return false;
  }
  const bool ordinary = split_updates<kSplits>(s);
  if (!ordinary) isolate_non_finite<kSplits>(s);
  add_products<kSplits, kSplits>(s.p_scores, 0, s.u_splits, 0, s.prefetches);
  store_output(p, at, v, columns, ordinary, s);
  for (std::int64_t i = 0; i < key_dim; i += 2 * kTileRows) {
    load_sums(state + i * kPanel, kPanel);
    add_products<kKeySplits, kSplits>(s.writes, i / kTileRows, s.weighed() || !ordinary ? s.u_writes : s.u_splits, 0,
                                      s.prefetches);
    store_sums(state + i * kPanel, kPanel);
    if (whole != nullptr && s.divided) scale_rows(state + i * kPanel, whole + i, state + i * kPanel);
  }
  return true;
}

// Computes all tokens of a range, chunk by chunk and within a chunk head by head. The arithmetic of a panel, and so its
// bits, does not depend on the other panels.
template <class T, int kKeySplits>
void ForwardRange(const DeltaForward<T>& p, const HeadRange& range, std::byte* memory) {
  constexpr int kSplits = kStateSplits<T>;
  const TilesInUse tiles;
  Arena arena(memory);
  FwdScratch s;
  s.lay_out(arena, p.shape, p.rule.decay, range.head_end - range.head, kStateSplits<float>);
  s.scaled = p.rule.decay == Decay::scalar || (p.rule.decay == Decay::none && p.rule.qk_l2norm);
  const Sequence sequence = sequence_of(p, range.n);
  const std::int64_t key_dim = p.shape.key_dim, head = range.head, head_end = range.head_end;
  const std::int64_t first = range.panel * kPanel, last = std::min(range.panel_end * kPanel, p.shape.value_dim);
  const auto scale = static_cast<float>(p.rule.scale_for(key_dim));
  const bool ordinary = std::abs(scale) >= kSmallestQueryScale && std::abs(scale) <= kLargestQueryScale;
  (std::is_same_v<T, float> && ordinary ? s.query_scale : s.out_scale) = scale;
  std::fill_n(s.query_factors, kChunk, s.query_scale);
  std::fill_n(s.out_factors, kChunk, s.out_scale);
  const bool streams = streams_states(p);
  float* const states = s.state;
  const std::int64_t padded_values = round_up(p.shape.value_dim, kPanel), state_floats = key_dim * padded_values;
  for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
    load_state_panels(p.initial_state, first, last, key_dim, states + (i_h - head) * state_floats, range.n, i_h);
  }
  for (std::int64_t start = sequence.begin; start < sequence.end; start += kChunk) {
    for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
      const ChunkPlace at(p.shape, sequence, i_h, start);
      s.state = states + (i_h - head) * state_floats;
      const bool more_heads = i_h + 1 < head_end;
      plan_prefetches(p, {p.shape, sequence, more_heads ? i_h + 1 : head, more_heads ? start : start + kChunk}, first,
                      last, s.prefetches);
      load_keys<kKeySplits>(p, at, s);
      store_chunk_state(s.state, p.chunk_states, streams, first, last, key_dim, at.i_b, sequence.chunk(start), i_h);
      finish_scores<kSplits>(at.tokens, s);
      if constexpr (kKeySplits == 1) {
        weigh_reads(at.tokens, s.chunk, s.scaled ? s.factors.k_norm : nullptr, s.weights);
      }
      for (std::int64_t v = first; v < last; v += kPanel) {
        const std::int64_t columns = std::min(kPanel, last - v);
        if (panel_chunk<kSplits, kKeySplits>(p, at, v, columns, s)) continue;
        if constexpr (kKeySplits == 1) {
          load_keys<3>(p, at, s);
          finish_scores<3>(at.tokens, s);
          panel_chunk<3, 3>(p, at, v, columns, s);
          load_keys<1>(p, at, s);  // for the panels that follow
          finish_scores<kSplits>(at.tokens, s);
        }
      }
    }
  }
  for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
    store_state_panels(states + (i_h - head) * state_floats, p.final_state, first, last, key_dim, range.n, i_h);
  }
  if (streams) hwy::FlushStream();
}

}  // namespace

std::size_t AmxFwdBytes(const DeltaShape& shape, Decay decay, std::int64_t heads) {
  Arena arena;
  FwdScratch().lay_out(arena, shape, decay, heads, kStateSplits<float>);
  return arena.bytes();
}

void AmxFwdRange(const DeltaForward<float>& p, const HeadRange& range, std::byte* memory) {
  ForwardRange<float, kStateSplits<float>>(p, range, memory);
}

void AmxFwdRange(const DeltaForward<bfloat16>& p, const HeadRange& range, std::byte* memory) {
  // Keys are exact in one split if no channel gate changes them.
  if (p.rule.decay == Decay::channel) {
    ForwardRange<bfloat16, 2>(p, range, memory);
  } else {
    ForwardRange<bfloat16, 1>(p, range, memory);
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3 && !defined(EFLA_NO_AMX)

#if HWY_ONCE
namespace efla::cpu {

#if (HWY_TARGETS & HWY_AVX3) && !defined(EFLA_NO_AMX)
bool amx_takes(const DeltaShape& shape) { return uses_amx() && shape.key_dim % N_AVX3::kTileDepth == 0; }

std::size_t amx_chunk_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return N_AVX3::AmxFwdBytes(shape, rule.decay, heads_per_block(shape, threads)) * static_cast<std::size_t>(threads);
}

template <class T>
void amx_chunk_fwd(const DeltaForward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t panels = (p.shape.value_dim + N_AVX3::kPanel - 1) / N_AVX3::kPanel;
  for_each_head_range(p.shape, panels, workspace, pool,
                      [&](const HeadRange& range, std::byte* memory) { N_AVX3::AmxFwdRange(p, range, memory); });
}
#else
bool amx_takes(const DeltaShape&) { return false; }
std::size_t amx_chunk_fwd_workspace_bytes(const DeltaShape&, const DeltaRule&, int) { return 0; }
template <class T>
void amx_chunk_fwd(const DeltaForward<T>&, Workspace, ThreadPool&) {}
#endif

template void amx_chunk_fwd(const DeltaForward<float>&, Workspace, ThreadPool&);
template void amx_chunk_fwd(const DeltaForward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
