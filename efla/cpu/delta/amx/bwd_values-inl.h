// One chunk of one value head in the backward on AMX (amx/chunk_bwd.cc): its operands and, per panel of value columns,
// U, G, dV and dS. amx/bwd_keys-inl.h continues from there. chunk_bwd.cc explains the symbols.
//
// Gradients are linear in dO and in the gradient of the final state. They are computed for scale 1: from dO itself,
// which is one split in bfloat16, and from the final state's gradient divided by the scale. Results are multiplied by
// the scale. dQ and dK are computed transposed, (dO Sᵀ)ᵀ = S dOᵀ, because otherwise S and dS would have to be
// transposed.
//
// A scalar gate is a factor of whole rows. Let c_r be the product of the decays from the chunk's start through row r,
// s_r the product of the decays after row r, and d the product of all decays of the chunk. Then E = c ⊙ K S + L U, dU =
// Pᵀ dO + s ⊙ K dS, dS ← d dS + Qᵀ (c ⊙ dO) + Kᵀ (c ⊙ G), dQᵀ = S (c ⊙ dO)ᵀ + …, dKᵀ = dS (s ⊙ U)ᵀ + S (c ⊙ G)ᵀ + …,
// and for the gradient of g (chunk_bwd_decay-inl.h) x = rowsum(dO ∘ c ⊙ Q S + G ∘ c ⊙ K S), y = rowsum(U ∘ s ⊙ K dS).
//
// With a channel gate K_read, Q_read and K_write (decayed_keys-inl.h) are separate matrices. With dŜ = diag(c_last) dS:
// E = K_read S + L U, dU = Pᵀ dO + K_write dŜ, dS ← dŜ + Q_readᵀ dO + K_readᵀ G, and with dP and dL strictly below the
// diagonal
//
//   dQ_read = dO Sᵀ + dP K_write,   dK_read = G Sᵀ + dL K_write,   dK_write = U dŜᵀ + B,   B = dPᵀ Q_read + dLᵀ K_read.
//
// The diagonal of dP multiplies q and k without decay. In the gradient of g, x = Q_read ∘ dQ_read + K_read ∘ dK_read −
// K_write ∘ B, in which pairs of tokens after t cancel, up to the rounding of terms inside of the chunk, and y =
// K_write ∘ U dŜᵀ. If keys are not divided by c, K_write contains the decays to the chunk's end, dU and U dŜᵀ take dS
// instead of dŜ, and pairs are added one by one (chunk_bwd_decay-inl.h).
#pragma once

#include "efla/cpu/delta/amx/decayed_keys-inl.h"
#include "efla/cpu/delta/chunk_bwd_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Number of splits of dO.
template <class T>
inline constexpr int kOutSplits = std::is_same_v<T, float> ? 3 : 1;
// Number of splits of dO times factors of its rows.
template <class T, Decay kDecay>
inline constexpr int kReadSplits = kDecay == Decay::scalar ? kStateSplits<T> : kOutSplits<T>;

// Scratch for one chunk of one value head.
struct AmxBwdScratch {
  ChunkScratch chunk;
  float* values = nullptr;   // panels [kChunk, kPanel]: V, then dV
  float* dout = nullptr;     // panels [kChunk, kPanel]
  float* u = nullptr;        // [kChunk, kPanel]
  float* g = nullptr;        // [kChunk, kPanel]
  float* errors = nullptr;   // [kChunk, kPanel]: K S, then E
  float* du = nullptr;       // [kChunk, kPanel]
  float* da = nullptr;       // per panel [kChunk, kLanes]: partial sums
  float* db = nullptr;       // per panel [kChunk, kLanes]
  float* dscores = nullptr;  // [2 kChunk, kChunk]: dP, then dL + dLᵀ, or dL with a channel gate
  float* sums = nullptr;     // [kPanel, kChunk]
  // With a channel gate.
  bool divided = false;       // whether keys are divided by c
  DecayGradient gradient;     // of g
  float* diagonal = nullptr;  // [kChunk] diagonal of dP
  SplitTiles write_keys, write_keys_t, dl_t_right;
  // With a scalar gate; `whole` is d.
  float whole = 1.0F;
  float* before = nullptr;    // [kChunk] c
  float* after = nullptr;     // [kChunk] s
  float* k_reads = nullptr;   // [kChunk, kPanel] c ⊙ K S
  float* q_reads = nullptr;   // [kChunk, kPanel] c ⊙ Q S
  float* k_writes = nullptr;  // [kChunk, kPanel] s ⊙ K dS
  float* scaled = nullptr;    // [kChunk, kPanel] rows times c or s
  float* x = nullptr;         // per panel [kChunk, kLanes]: partial sums
  float* y = nullptr;         // per panel [kChunk, kLanes]
  float* through = nullptr;   // per panel [kLanes]: sums of dS ∘ S
  float* pairs = nullptr;     // [2 kChunk, kChunk]: dP ∘ P, then dL ∘ L
  // Left operands have the name of the matrix, right operands end in _right, transposes in _t.
  SplitTiles keys, keys_t_right, keys_t, queries_t;  // keys holds K, then Q, or K_read and Q_read
  SplitTiles p_scores, p_scores_right, p_scores_t;
  SplitTiles state, state_right;    // S; of a panel of columns
  SplitTiles dstate, dstate_right;  // dS
  SplitTiles douts, dout_right, dout_t_right;
  SplitTiles us, u_t_right;
  SplitTiles gs, g_right, g_t_right;
  SplitTiles dp, dp_right, dp_t_right;
  SplitTiles dl, dl_right;
  // c ⊙ dO, c ⊙ G and s ⊙ U, with a scalar gate: the right operands _read and _write come from these, otherwise from
  // the operands above.
  SplitTiles dout_reads, g_reads, u_writes;
  SplitTiles dout_read_right, u_write_t_right;
  RowPrefetches prefetches;

  void lay_out(Arena& arena, const DeltaShape& shape, Decay decay, int splits) {
    chunk.lay_out(arena, shape, decay);
    const std::int64_t padded_values = round_up(shape.value_dim, kPanel), panels = padded_values / kPanel;
    const std::int64_t depth = shape.key_dim / kTileDepth;
    for (float** all : {&values, &dout}) *all = arena.floats(kChunk * padded_values);
    for (float** panel : {&u, &g, &errors, &du, &sums}) *panel = arena.floats(kChunk * kPanel);
    for (float** partial : {&da, &db}) *partial = arena.floats(panels * kChunk * kLanes);
    dscores = arena.floats(2 * kChunk * kChunk);
    keys.lay_out(arena, splits, 4, depth);
    keys_t_right.lay_out(arena, splits, 2, depth);
    for (SplitTiles* rows : {&keys_t, &queries_t}) rows->lay_out(arena, splits, 2 * depth, 1);
    for (SplitTiles* square : {&p_scores, &p_scores_right, &p_scores_t, &dout_right, &g_right, &dp, &dp_right,
                               &dp_t_right, &dl, &dl_right}) {
      square->lay_out(arena, splits, 2, 1);
    }
    for (SplitTiles* rows : {&state, &dstate}) rows->lay_out(arena, splits, 2 * depth, panels);
    for (SplitTiles* columns : {&state_right, &dstate_right}) columns->lay_out(arena, splits, 2, depth);
    for (SplitTiles* tokens : {&douts, &dout_t_right, &us, &u_t_right, &gs, &g_t_right}) {
      tokens->lay_out(arena, splits, 2, panels);
    }
    if (decay == Decay::channel) {
      gradient.lay_out(arena, shape.key_dim, shape.key_dim * panels);
      diagonal = arena.floats(kChunk);
      write_keys.lay_out(arena, splits, 2, depth);
      write_keys_t.lay_out(arena, splits, 2 * depth, 1);
      dl_t_right.lay_out(arena, splits, 2, 1);
    }
    if (decay != Decay::scalar) return;
    for (float** factors : {&before, &after}) *factors = arena.floats(kChunk);
    for (float** panel : {&k_reads, &q_reads, &k_writes, &scaled}) *panel = arena.floats(kChunk * kPanel);
    for (float** partial : {&x, &y}) *partial = arena.floats(panels * kChunk * kLanes);
    through = arena.floats(panels * kLanes);
    pairs = arena.floats(2 * kChunk * kChunk);
    dout_read_right.lay_out(arena, splits, 2, 1);
    for (SplitTiles* tokens : {&dout_reads, &g_reads, &u_writes, &u_write_t_right}) {
      tokens->lay_out(arena, splits, 2, panels);
    }
  }
};

// Computes c, s and d, and multiplies P and L by the decays between their tokens.
HWY_INLINE void weigh_all_scores(std::int64_t tokens, AmxBwdScratch& s) {
  const ChunkDecay& decay = s.chunk.decay;
  float product = 1.0F;
  for (std::int64_t r = 0; r < tokens; ++r) s.before[r] = product *= decay.token[r * decay.key_stride];
  s.whole = product;
  product = 1.0F;
  for (std::int64_t r = tokens - 1; r >= 0; --r) {
    s.after[r] = product;
    product *= decay.token[r * decay.key_stride];
  }
  for (float* factors : {s.before, s.after}) std::fill(factors + tokens, factors + kChunk, 0.0F);
  multiply_weights(tokens, decay.token, decay.key_stride, decay.weights);
  weigh_scores(tokens, decay, s.chunk.scores, s.chunk.scores + kChunk * kChunk);
}

// Transposes 32 rows of a left operand from `block` on, into s.keys_t_right and into the left operand `out`.
template <int kKeySplits>
HWY_INLINE void transpose_key_rows(SplitTiles rows, std::int64_t block, SplitTiles out, AmxBwdScratch& s) {
  transpose_rows<kKeySplits>(rows, block, s.keys_t_right, 0, s.keys_t_right.depth);
  transpose_columns<kKeySplits>(s.keys_t_right, out);
}

// Loads q, k, the gains and the decays of a chunk, with zeros after the last token, computes P and L, and splits Q, K
// and P.
template <Decay kDecay, int kKeySplits, class T>
HWY_NOINLINE void load_keys(const DeltaBackward<T>& p, const ChunkPlace& at, AmxBwdScratch& s) {
  constexpr int kSplits = kStateSplits<T>;
  ChunkScratch& c = s.chunk;
  load_chunk(p, at, c);
  const std::int64_t rest = kChunk - at.tokens;
  for (float* gains : {c.erase, c.write}) std::fill_n(gains + at.tokens, rest, 0.0F);
  if constexpr (kDecay == Decay::channel) {
    s.divided = split_decayed_keys<kKeySplits>(at, p.shape.key_dim, c, s.keys, s.write_keys);
  } else {
    for (float* rows : {c.q, c.k}) std::fill_n(rows + at.tokens * c.key_stride, rest * c.key_stride, 0.0F);
    split_rows<kKeySplits>(c.k, c.key_stride, 0, kChunk, s.keys);
    split_rows<kKeySplits>(c.q, c.key_stride, kChunk, kChunk, s.keys);
  }
  transpose_key_rows<kKeySplits>(s.keys, 2, s.queries_t, s);
  transpose_key_rows<kKeySplits>(s.keys, 0, s.keys_t, s);
  if constexpr (kDecay == Decay::channel) transpose_key_rows<kKeySplits>(s.write_keys, 0, s.write_keys_t, s);
  if (kDecay != Decay::channel || s.divided) {
    zero_sums();
    add_products<kKeySplits, kKeySplits, Product::lower>(s.keys, 0, s.keys_t_right, 0, s.prefetches);
    store_sums(c.scores + kChunk * kChunk, kChunk);
    zero_sums();
    add_products<kKeySplits, kKeySplits, Product::lower>(s.keys, 2, s.keys_t_right, 0, s.prefetches);
    store_sums(c.scores, kChunk);
  }
  if (kDecay == Decay::scalar) weigh_all_scores(at.tokens, s);
  for (std::int64_t r = 0; r < kChunk; ++r) {
    std::fill(c.scores + r * kChunk + r + 1, c.scores + (r + 1) * kChunk, 0.0F);
  }
  split_rows<kSplits>(c.scores, kChunk, 0, kChunk, s.p_scores);
  transpose_rows<kSplits>(s.p_scores, 0, s.p_scores_right, 0, 1);
  transpose_columns<kSplits>(s.p_scores_right, s.p_scores_t);
}

// Loads and splits columns [first, first + kPanel) of the state before the chunk.
template <class T>
HWY_INLINE void load_state(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                           AmxBwdScratch& s) {
  constexpr int kSplits = kStateSplits<T>;
  const std::int64_t key_dim = p.shape.key_dim, columns = std::min(kPanel, p.shape.value_dim - first);
  const std::int64_t row_stride = p.chunk_states.stride[3], stride = p.chunk_states.stride[4], panel = first / kPanel;
  const float* state = p.chunk_states.at(at.i_b, saved, at.i_h, std::int64_t{0}, first);
  if (stride == 1 && columns == kPanel)
    return split_panel<kSplits>(state, row_stride, key_dim, panel, s.state, s.state_right);
  for (std::int64_t i = 0; i < key_dim; i += kPanel) {
    for (std::int64_t r = 0; r < kPanel; ++r) {
      load_row(state + (i + r) * row_stride, stride, columns, kPanel, s.du + r * kPanel);
    }
    split_panel<kSplits>(s.du, kPanel, kPanel, panel, s.state.rows_from(i), s.state_right.depth_from(i / kTileDepth));
  }
}

// Stores, or adds, partial sums of the rows of x ∘ y, [kChunk, kLanes].
template <bool kAdd>
HWY_INLINE void row_products(const float* x, const float* y, float* sums) {
  for (std::int64_t r = 0; r < kChunk; ++r) {
    const std::int64_t at = r * kPanel;
    const __m512 left = kAdd ? _mm512_load_ps(sums + r * kLanes) : _mm512_setzero_ps();
    const __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(x + at), _mm512_load_ps(y + at), left);
    _mm512_store_ps(sums + r * kLanes,
                    _mm512_fmadd_ps(_mm512_load_ps(x + at + kLanes), _mm512_load_ps(y + at + kLanes), sum));
  }
}

// Computes the partial sums of dS ∘ S for one panel of dS, then dS ← D dS.
template <Decay kDecay, class T>
HWY_INLINE void decay_state(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                            float scale, float* dstate, const AmxBwdScratch& s) {
  const std::int64_t columns = std::min(kPanel, p.shape.value_dim - first), panel = first / kPanel;
  const float* channels = s.chunk.decay.whole;
  __m512 whole = _mm512_set1_ps(s.whole), sum = _mm512_setzero_ps();
  HWY_ALIGN float row[kPanel];
  for (std::int64_t i = 0; i < p.shape.key_dim; ++i) {
    load_row(p.chunk_states.at(at.i_b, saved, at.i_h, i, first), p.chunk_states.stride[4], columns, kPanel, row);
    float* to = dstate + i * kPanel;
    const __m512 d0 = _mm512_load_ps(to), d1 = _mm512_load_ps(to + kLanes);
    if constexpr (kDecay == Decay::channel) {
      whole = _mm512_set1_ps(channels[i]);
      sum = _mm512_setzero_ps();
    }
    sum = _mm512_fmadd_ps(d0, _mm512_load_ps(row), sum);
    sum = _mm512_fmadd_ps(d1, _mm512_load_ps(row + kLanes), sum);
    if constexpr (kDecay == Decay::channel) {
      _mm512_store_ps(s.gradient.state_sums + (panel * p.shape.key_dim + i) * kLanes,
                      _mm512_mul_ps(_mm512_set1_ps(scale), sum));
    }
    _mm512_store_ps(to, _mm512_mul_ps(whole, d0));
    _mm512_store_ps(to + kLanes, _mm512_mul_ps(whole, d1));
  }
  if constexpr (kDecay == Decay::scalar) _mm512_store_ps(s.through + panel * kLanes, sum);
}

// Computes one panel of value columns of a chunk: U, G, dV, partial sums of da and db, and the panel dstate [K, kPanel]
// of dS.
template <Decay kDecay, int kKeySplits, class T>
HWY_NOINLINE void value_panel(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                              float scale, float* dstate, AmxBwdScratch& s) {
  constexpr bool kFactors = kDecay == Decay::scalar;
  constexpr int kSplits = kStateSplits<T>;
  const std::int64_t key_dim = p.shape.key_dim, panel = first / kPanel, partial = panel * kChunk * kLanes;
  float* values = s.values + first * kChunk;
  const float* dout = s.dout + first * kChunk;
  load_state(p, at, saved, first, s);
  if (kDecay == Decay::channel && s.divided) decay_state<kDecay>(p, at, saved, first, scale, dstate, s);
  split_panel<kSplits>(dstate, kPanel, key_dim, panel, s.dstate, s.dstate_right);
  if (kDecay == Decay::channel && !s.divided) decay_state<kDecay>(p, at, saved, first, scale, dstate, s);
  split_panel<kOutSplits<T>>(dout, kPanel, kChunk, panel, s.douts, s.dout_right);
  zero_sums();
  add_products<kKeySplits, kSplits>(s.keys, 0, s.state_right, 0, s.prefetches);
  store_sums(s.errors, kPanel);
  zero_sums();
  add_products<kKeySplits, kSplits>(kDecay == Decay::channel ? s.write_keys : s.keys, 0, s.dstate_right, 0,
                                    s.prefetches);
  if constexpr (kFactors) {
    store_sums(s.k_writes, kPanel);
    scale_rows(s.k_writes, s.after, s.k_writes);
    zero_sums();
    add_products<kKeySplits, kSplits>(s.keys, 2, s.state_right, 0, s.prefetches);
    store_sums(s.q_reads, kPanel);
    scale_rows(s.q_reads, s.before, s.q_reads);
    row_products<false>(dout, s.q_reads, s.x + partial);
    scale_rows(s.errors, s.before, s.errors);
    std::copy_n(s.errors, kChunk * kPanel, s.k_reads);
    scale_rows(dout, s.before, s.scaled);
    split_panel<kSplits>(s.scaled, kPanel, kChunk, panel, s.dout_reads, s.dout_read_right);
    decay_state<kDecay>(p, at, saved, first, scale, dstate, s);
    load_sums(s.k_writes, kPanel);
  }
  add_products<kSplits, kOutSplits<T>>(s.p_scores_t, 0, s.dout_right, 0, s.prefetches);
  store_sums(s.du, kPanel);
  ErrorSubstitutionTiles<true> substitution{s.chunk, s.errors, values, s.u};
  for_tiles(kChunk, substitution);
  ReverseSubstitutionTiles<true> reverse{s.chunk, key_dim, kChunk,         nullptr,        s.errors, values,
                                         nullptr, s.g,     s.da + partial, s.db + partial, s.du};
  for_tiles_reversed(kChunk, reverse);
  split_panel_rows<kSplits>(s.u, panel, s.us);
  transpose_rows<kSplits>(s.us, 0, s.u_t_right, panel, panel + 1);
  if constexpr (kFactors) {
    row_products<true>(s.g, s.k_reads, s.x + partial);
    row_products<false>(s.u, s.k_writes, s.y + partial);
    split_panel_rows<kSplits>(s.g, panel, s.gs);
    scale_rows(s.g, s.before, s.scaled);
    split_panel<kSplits>(s.scaled, kPanel, kChunk, panel, s.g_reads, s.g_right);
    scale_rows(s.u, s.after, s.scaled);
    split_panel_rows<kSplits>(s.scaled, panel, s.u_writes);
    transpose_rows<kSplits>(s.u_writes, 0, s.u_write_t_right, panel, panel + 1);
  } else {
    split_panel<kSplits>(s.g, kPanel, kChunk, panel, s.gs, s.g_right);
  }
  const SplitTiles& dout_read_right = kFactors ? s.dout_read_right : s.dout_right;
  for (std::int64_t i = 0; i < key_dim; i += 2 * kTileRows) {
    load_sums(dstate + i * kPanel, kPanel);
    add_products<kKeySplits, kReadSplits<T, kDecay>>(s.queries_t, i / kTileRows, dout_read_right, 0, s.prefetches);
    add_products<kKeySplits, kSplits>(s.keys_t, i / kTileRows, s.g_right, 0, s.prefetches);
    store_sums(dstate + i * kPanel, kPanel);
  }
  transpose_rows<kSplits>(kFactors ? s.g_reads : s.gs, 0, s.g_t_right, panel, panel + 1);
  transpose_rows<kReadSplits<T, kDecay>>(kFactors ? s.dout_reads : s.douts, 0, s.dout_t_right, panel, panel + 1);
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
