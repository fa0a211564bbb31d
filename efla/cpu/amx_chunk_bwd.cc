// The chunkwise backward (chunk_bwd.cc) with its matrix products on a matrix unit (parts-inl.h).
//
// Gradients are linear in dO and the final state's: they are computed for scale 1, from dO as it is, which bfloat16
// holds in one part, and the final state's divided by the scale; what goes out is multiplied by it. dQ and dK are made
// transposed, since S and dS would otherwise have to be: (dO Sᵀ)ᵀ = S dOᵀ.
//
// A decay per head is a factor of whole rows: with c_r the decays from the chunk's start to row r and s_r those from
// behind it to the end, E = c ⊙ K S + L U, dU = Pᵀ dO + s ⊙ K dS, dS ← d dS + Qᵀ (c ⊙ dO) + Kᵀ (c ⊙ G),
// dQᵀ = S (c ⊙ dO)ᵀ + …, dKᵀ = dS (s ⊙ U)ᵀ + S (c ⊙ G)ᵀ + …, and of g's gradient (chunk_bwd_decay-inl.h)
// x = rowsum(dO ∘ c ⊙ Q S + G ∘ c ⊙ K S), y = rowsum(U ∘ s ⊙ K dS).
//
// With a decay of channels K_read, Q_read and K_write (decayed_keys-inl.h) are matrices of their own: with dŜ =
// diag(c_last) dS, E = K_read S + L U, dU = Pᵀ dO + K_write dŜ, dS ← dŜ + Q_readᵀ dO + K_readᵀ G and, dP and dL
// strictly below the diagonal,
//
//   dQ_read = dO Sᵀ + dP K_write,   dK_read = G Sᵀ + dL K_write,   dK_write = U dŜᵀ + B,   B = dPᵀ Q_read + dLᵀ K_read.
//
// The diagonal of dP meets q and k as they are. Of g's gradient x = Q_read ∘ dQ_read + K_read ∘ dK_read − K_write ∘ B,
// in which pairs of tokens after t cancel, to the rounding of what lies inside of the chunk, and y = K_write ∘ U dŜᵀ.
// Where keys are not divided by c the pairs are added one by one (chunk_bwd_decay-inl.h).
#include "efla/cpu/amx.h"
#include "efla/cpu/delta.h"
#include "efla/cpu/heads_parts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/amx_chunk_bwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk_bwd_tiles-inl.h"

#if HWY_TARGET == HWY_AVX3
#include "efla/cpu/decayed_keys-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Parts of dO.
template <class T>
inline constexpr int kOutParts = std::is_same_v<T, float> ? 3 : 1;
// Parts of dO times factors of its rows.
template <class T, Decay kDecay>
inline constexpr int kReadParts = kDecay == Decay::scalar ? kStateParts<T> : kOutParts<T>;

// One chunk of one value head.
struct Scratch {
  ChunkScratch chunk;
  float* values = nullptr;   // panels [kChunk, kPanel]: V, then dV
  float* dout = nullptr;     // panels [kChunk, kPanel]
  float* u = nullptr;        // [kChunk, kPanel]
  float* g = nullptr;        // [kChunk, kPanel]
  float* errors = nullptr;   // [kChunk, kPanel]: K S, then E
  float* du = nullptr;       // [kChunk, kPanel]
  float* da = nullptr;       // for each panel [kChunk, kLanes]: partial sums
  float* db = nullptr;       // for each panel [kChunk, kLanes]
  float* dscores = nullptr;  // [2 kChunk, kChunk]: dP, then dL + dLᵀ, or dL with a decay of channels
  float* sums = nullptr;     // [kPanel, kChunk]
  // With a decay of channels.
  bool divided = false;       // keys, by c
  DecayGradient gradient;     // of g
  float* diagonal = nullptr;  // [kChunk] of dP
  PartTiles write_keys, write_keys_t, dl_t_right;
  // With a decay per head, d = whole its product over the chunk.
  float whole = 1.0F;
  float* before = nullptr;    // [kChunk] c
  float* after = nullptr;     // [kChunk] s
  float* k_reads = nullptr;   // [kChunk, kPanel] c ⊙ K S
  float* q_reads = nullptr;   // [kChunk, kPanel] c ⊙ Q S
  float* k_writes = nullptr;  // [kChunk, kPanel] s ⊙ K dS
  float* scaled = nullptr;    // [kChunk, kPanel] rows times c or s
  float* x = nullptr;         // for each panel [kChunk, kLanes]: partial sums
  float* y = nullptr;         // for each panel [kChunk, kLanes]
  float* through = nullptr;   // for each panel [kLanes]: of dS ∘ S
  float* pairs = nullptr;     // [2 kChunk, kChunk]: dP ∘ P, then dL ∘ L
  // Left operands are named by the matrix, right ones too, with _right; _t is the transpose.
  PartTiles keys, keys_t_right, keys_t, queries_t;  // keys holds K, then Q, or K_read and Q_read
  PartTiles p_scores, p_scores_right, p_scores_t;
  PartTiles state, state_right;    // S; of a panel of columns
  PartTiles dstate, dstate_right;  // dS
  PartTiles douts, dout_right, dout_t_right;
  PartTiles us, u_t_right;
  PartTiles gs, g_right, g_t_right;
  PartTiles dp, dp_right, dp_t_right;
  PartTiles dl, dl_right;
  // c ⊙ dO, c ⊙ G and s ⊙ U, with a decay per head: from these come _read and _write right operands, otherwise from the
  // above.
  PartTiles dout_reads, g_reads, u_writes;
  PartTiles dout_read_right, u_write_t_right;
  RowsAhead ahead;

  void lay_out(Arena& arena, const DeltaShape& shape, Decay decay, int parts) {
    chunk.lay_out(arena, shape, decay);
    const std::int64_t padded_values = round_up(shape.value_dim, kPanel), panels = padded_values / kPanel;
    const std::int64_t depth = shape.key_dim / kTileDepth;
    for (float** all : {&values, &dout}) *all = arena.floats(kChunk * padded_values);
    for (float** panel : {&u, &g, &errors, &du, &sums}) *panel = arena.floats(kChunk * kPanel);
    for (float** partial : {&da, &db}) *partial = arena.floats(panels * kChunk * kLanes);
    dscores = arena.floats(2 * kChunk * kChunk);
    keys.lay_out(arena, parts, 4, depth);
    keys_t_right.lay_out(arena, parts, 2, depth);
    for (PartTiles* rows : {&keys_t, &queries_t}) rows->lay_out(arena, parts, 2 * depth, 1);
    for (PartTiles* square : {&p_scores, &p_scores_right, &p_scores_t, &dout_right, &g_right, &dp, &dp_right,
                              &dp_t_right, &dl, &dl_right}) {
      square->lay_out(arena, parts, 2, 1);
    }
    for (PartTiles* rows : {&state, &dstate}) rows->lay_out(arena, parts, 2 * depth, panels);
    for (PartTiles* columns : {&state_right, &dstate_right}) columns->lay_out(arena, parts, 2, depth);
    for (PartTiles* tokens : {&douts, &dout_t_right, &us, &u_t_right, &gs, &g_t_right}) {
      tokens->lay_out(arena, parts, 2, panels);
    }
    if (decay == Decay::channel) {
      gradient.lay_out(arena, shape.key_dim, shape.key_dim * panels);
      diagonal = arena.floats(kChunk);
      write_keys.lay_out(arena, parts, 2, depth);
      write_keys_t.lay_out(arena, parts, 2 * depth, 1);
      dl_t_right.lay_out(arena, parts, 2, 1);
    }
    if (decay != Decay::scalar) return;
    for (float** factors : {&before, &after}) *factors = arena.floats(kChunk);
    for (float** panel : {&k_reads, &q_reads, &k_writes, &scaled}) *panel = arena.floats(kChunk * kPanel);
    for (float** partial : {&x, &y}) *partial = arena.floats(panels * kChunk * kLanes);
    through = arena.floats(panels * kLanes);
    pairs = arena.floats(2 * kChunk * kChunk);
    dout_read_right.lay_out(arena, parts, 2, 1);
    for (PartTiles* tokens : {&dout_reads, &g_reads, &u_writes, &u_write_t_right}) {
      tokens->lay_out(arena, parts, 2, panels);
    }
  }
};

// Some query heads of a sequence with their value heads.
struct HeadsScratch {
  Scratch chunk;
  std::int64_t state_floats, part_floats;
  float* dstate;  // for each value head panels [K, kPanel] of dS
  float* parts;   // [2 kChunk, Kp] dq and dk: their sum and the next value head's

  HeadsScratch(Arena& arena, const DeltaShape& shape, Decay decay, std::int64_t query_heads)
      : state_floats(shape.key_dim * round_up(shape.value_dim, kPanel)), part_floats(2 * kChunk * shape.key_dim) {
    chunk.lay_out(arena, shape, decay, kStateParts<float>);
    dstate = arena.floats(query_heads * shape.group() * state_floats);
    parts = arena.floats(2 * part_floats);
  }
};

// c, s, d and, of P and L, the decays between their tokens.
HWY_INLINE void weigh_all_scores(std::int64_t tokens, Scratch& s) {
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

// 32 rows of a left operand from `block` on, transposed: as a left operand, and in s.keys_t_right.
template <int kKeyParts>
HWY_INLINE void transpose_key_rows(PartTiles rows, std::int64_t block, PartTiles out, Scratch& s) {
  transpose_rows<kKeyParts>(rows, block, s.keys_t_right, 0, s.keys_t_right.depth);
  transpose_columns<kKeyParts>(s.keys_t_right, out);
}

// q, k and the gains of a chunk, zeros behind the last token, and the operands made of them.
template <Decay kDecay, int kKeyParts, class T>
HWY_NOINLINE void load_keys(const DeltaBackward<T>& p, const ChunkPlace& at, Scratch& s) {
  constexpr int kParts = kStateParts<T>;
  ChunkScratch& c = s.chunk;
  load_chunk(p, at, c);
  const std::int64_t rest = kChunk - at.tokens;
  for (float* gains : {c.erase, c.write}) std::fill_n(gains + at.tokens, rest, 0.0F);
  if constexpr (kDecay == Decay::channel) {
    s.divided = cut_decayed_keys<kKeyParts>(at, p.shape.key_dim, c, s.keys, s.write_keys);
  } else {
    for (float* rows : {c.q, c.k}) std::fill_n(rows + at.tokens * c.key_stride, rest * c.key_stride, 0.0F);
    cut_rows<kKeyParts>(c.k, c.key_stride, 0, kChunk, s.keys);
    cut_rows<kKeyParts>(c.q, c.key_stride, kChunk, kChunk, s.keys);
  }
  transpose_key_rows<kKeyParts>(s.keys, 2, s.queries_t, s);
  transpose_key_rows<kKeyParts>(s.keys, 0, s.keys_t, s);
  if constexpr (kDecay == Decay::channel) transpose_key_rows<kKeyParts>(s.write_keys, 0, s.write_keys_t, s);
  if (kDecay != Decay::channel || s.divided) {
    zero_sums();
    add_products<kKeyParts, kKeyParts, Product::lower>(s.keys, 0, s.keys_t_right, 0, s.ahead);
    store_sums(c.scores + kChunk * kChunk, kChunk);
    zero_sums();
    add_products<kKeyParts, kKeyParts, Product::lower>(s.keys, 2, s.keys_t_right, 0, s.ahead);
    store_sums(c.scores, kChunk);
  }
  if (kDecay == Decay::scalar) weigh_all_scores(at.tokens, s);
  for (std::int64_t r = 0; r < kChunk; ++r) {
    std::fill(c.scores + r * kChunk + r + 1, c.scores + (r + 1) * kChunk, 0.0F);
  }
  cut_rows<kParts>(c.scores, kChunk, 0, kChunk, s.p_scores);
  transpose_rows<kParts>(s.p_scores, 0, s.p_scores_right, 0, 1);
  transpose_columns<kParts>(s.p_scores_right, s.p_scores_t);
}

// Columns [first, first + kPanel) of the state before the chunk.
template <class T>
HWY_INLINE void load_state(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                           Scratch& s) {
  constexpr int kParts = kStateParts<T>;
  const std::int64_t key_dim = p.shape.key_dim, columns = std::min(kPanel, p.shape.value_dim - first);
  const std::int64_t row_stride = p.chunk_states.stride[3], stride = p.chunk_states.stride[4], panel = first / kPanel;
  const float* state = p.chunk_states.at(at.i_b, saved, at.i_h, std::int64_t{0}, first);
  if (stride == 1 && columns == kPanel)
    return cut_panel<kParts>(state, row_stride, key_dim, panel, s.state, s.state_right);
  for (std::int64_t i = 0; i < key_dim; i += kPanel) {
    for (std::int64_t r = 0; r < kPanel; ++r) {
      load_row(state + (i + r) * row_stride, stride, columns, kPanel, s.du + r * kPanel);
    }
    cut_panel<kParts>(s.du, kPanel, kPanel, panel, s.state.rows_from(i), s.state_right.depth_from(i / kTileDepth));
  }
}

// Partial sums of the rows of x ∘ y, [kChunk, kLanes], or added to them.
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

// One panel of dS: the partial sums of dS ∘ S, then dS ← D dS.
template <Decay kDecay, class T>
HWY_INLINE void decay_state(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                            float scale, float* dstate, const Scratch& s) {
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

// Everything of one chunk that is done panel by panel of value columns; dstate: [K, kPanel].
template <Decay kDecay, int kKeyParts, class T>
HWY_NOINLINE void value_panel(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                              float scale, float* dstate, Scratch& s) {
  constexpr bool kFactors = kDecay == Decay::scalar;
  constexpr int kParts = kStateParts<T>;
  const std::int64_t key_dim = p.shape.key_dim, panel = first / kPanel, partial = panel * kChunk * kLanes;
  float* values = s.values + first * kChunk;
  const float* dout = s.dout + first * kChunk;
  load_state(p, at, saved, first, s);
  if (kDecay == Decay::channel && s.divided) decay_state<kDecay>(p, at, saved, first, scale, dstate, s);
  cut_panel<kParts>(dstate, kPanel, key_dim, panel, s.dstate, s.dstate_right);
  if (kDecay == Decay::channel && !s.divided) decay_state<kDecay>(p, at, saved, first, scale, dstate, s);
  cut_panel<kOutParts<T>>(dout, kPanel, kChunk, panel, s.douts, s.dout_right);
  zero_sums();
  add_products<kKeyParts, kParts>(s.keys, 0, s.state_right, 0, s.ahead);
  store_sums(s.errors, kPanel);
  zero_sums();
  add_products<kKeyParts, kParts>(kDecay == Decay::channel ? s.write_keys : s.keys, 0, s.dstate_right, 0, s.ahead);
  if constexpr (kFactors) {
    store_sums(s.k_writes, kPanel);
    scale_rows(s.k_writes, s.after, s.k_writes);
    zero_sums();
    add_products<kKeyParts, kParts>(s.keys, 2, s.state_right, 0, s.ahead);
    store_sums(s.q_reads, kPanel);
    scale_rows(s.q_reads, s.before, s.q_reads);
    row_products<false>(dout, s.q_reads, s.x + partial);
    scale_rows(s.errors, s.before, s.errors);
    std::copy_n(s.errors, kChunk * kPanel, s.k_reads);
    scale_rows(dout, s.before, s.scaled);
    cut_panel<kParts>(s.scaled, kPanel, kChunk, panel, s.dout_reads, s.dout_read_right);
    decay_state<kDecay>(p, at, saved, first, scale, dstate, s);
    load_sums(s.k_writes, kPanel);
  }
  add_products<kParts, kOutParts<T>>(s.p_scores_t, 0, s.dout_right, 0, s.ahead);
  store_sums(s.du, kPanel);
  ErrorSubstitutionTiles<true> substitution{s.chunk, s.errors, values, s.u};
  for_tiles(kChunk, substitution);
  ReverseSubstitutionTiles<true> reverse{s.chunk, key_dim, kChunk,         nullptr,        s.errors, values,
                                         nullptr, s.g,     s.da + partial, s.db + partial, s.du};
  for_tiles_reversed(kChunk, reverse);
  cut_panel_rows<kParts>(s.u, panel, s.us);
  transpose_rows<kParts>(s.us, 0, s.u_t_right, panel, panel + 1);
  if constexpr (kFactors) {
    row_products<true>(s.g, s.k_reads, s.x + partial);
    row_products<false>(s.u, s.k_writes, s.y + partial);
    cut_panel_rows<kParts>(s.g, panel, s.gs);
    scale_rows(s.g, s.before, s.scaled);
    cut_panel<kParts>(s.scaled, kPanel, kChunk, panel, s.g_reads, s.g_right);
    scale_rows(s.u, s.after, s.scaled);
    cut_panel_rows<kParts>(s.scaled, panel, s.u_writes);
    transpose_rows<kParts>(s.u_writes, 0, s.u_write_t_right, panel, panel + 1);
  } else {
    cut_panel<kParts>(s.g, kPanel, kChunk, panel, s.gs, s.g_right);
  }
  const PartTiles& dout_read_right = kFactors ? s.dout_read_right : s.dout_right;
  for (std::int64_t i = 0; i < key_dim; i += 2 * kTileRows) {
    load_sums(dstate + i * kPanel, kPanel);
    add_products<kKeyParts, kReadParts<T, kDecay>>(s.queries_t, i / kTileRows, dout_read_right, 0, s.ahead);
    add_products<kKeyParts, kParts>(s.keys_t, i / kTileRows, s.g_right, 0, s.ahead);
    store_sums(dstate + i * kPanel, kPanel);
  }
  transpose_rows<kParts>(kFactors ? s.g_reads : s.gs, 0, s.g_t_right, panel, panel + 1);
  transpose_rows<kReadParts<T, kDecay>>(kFactors ? s.dout_reads : s.douts, 0, s.dout_t_right, panel, panel + 1);
}

// dP, zeros above the diagonal, and dL + dLᵀ, zeros on it, in parts; with a decay of channels both strictly below the
// diagonal or, where keys are not divided, with dP's diagonal and times `scale` in s.dscores.
template <Decay kDecay, class T>
HWY_NOINLINE void score_gradients(float scale, Scratch& s) {
  constexpr int kParts = kStateParts<T>;
  float *dp = s.dscores, *dl = dp + kChunk * kChunk;
  zero_sums();
  add_products<kOutParts<T>, kParts, Product::lower>(s.douts, 0, s.u_t_right, 0, s.ahead);
  store_sums(dp, kChunk);
  zero_sums();
  add_products<kParts, kParts, Product::lower>(s.gs, 0, s.u_t_right, 0, s.ahead);
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
  cut_panel<kParts>(dp, kChunk, kChunk, 0, s.dp, s.dp_right);
  cut_panel<kParts>(dl, kChunk, kChunk, 0, s.dl, s.dl_right);
  transpose_rows<kParts>(s.dp, 0, s.dp_t_right, 0, 1);
  if constexpr (kDecay == Decay::channel) transpose_rows<kParts>(s.dl, 0, s.dl_t_right, 0, 1);
}

// The sums, [32 keys, kChunk], times `scale` to columns of dq or dk [kChunk, K].
HWY_INLINE void store_gradient(float scale, std::int64_t key_dim, float* sums, float* out) {
  constexpr std::int64_t kTileFloats = kTileRows * kTileRows;
  store_tile<0>(sums, kTileBytes);
  store_tile<1>(sums + kTileFloats, kTileBytes);
  store_tile<2>(sums + 2 * kTileFloats, kTileBytes);
  store_tile<3>(sums + 3 * kTileFloats, kTileBytes);
  const __m512 factor = _mm512_set1_ps(scale);
  HWY_ALIGN float tile[kTileFloats];
  for (std::int64_t i = 0; i < 4; ++i) {
    transpose_tile(reinterpret_cast<const Part*>(sums + i * kTileFloats), reinterpret_cast<Part*>(tile));
    float* to = out + i % 2 * kTileRows * key_dim + i / 2 * kTileRows;
    for (std::int64_t r = 0; r < kTileRows; ++r) {
      _mm512_store_ps(to + r * key_dim, _mm512_mul_ps(factor, _mm512_load_ps(tile + r * kTileRows)));
    }
  }
}

template <Decay kDecay, int kKeyParts, class T>
HWY_NOINLINE void key_gradients(std::int64_t key_dim, float scale, Scratch& s, float* dq, float* dk) {
  constexpr int kParts = kStateParts<T>;
  constexpr bool kFactors = kDecay == Decay::scalar;
  for (std::int64_t i = 0; i < key_dim; i += 2 * kTileRows) {
    const std::int64_t block = i / kTileRows;
    zero_sums();
    add_products<kParts, kReadParts<T, kDecay>>(s.state, block, s.dout_t_right, 0, s.ahead);
    add_products<kKeyParts, kParts>(s.keys_t, block, s.dp_t_right, 0, s.ahead);
    store_gradient(scale, key_dim, s.sums, dq + i);
    zero_sums();
    add_products<kParts, kParts>(s.dstate, block, kFactors ? s.u_write_t_right : s.u_t_right, 0, s.ahead);
    add_products<kParts, kParts>(s.state, block, s.g_t_right, 0, s.ahead);
    add_products<kKeyParts, kParts>(s.queries_t, block, s.dp_right, 0, s.ahead);
    add_products<kKeyParts, kParts>(s.keys_t, block, s.dl_right, 0, s.ahead);
    store_gradient(scale, key_dim, s.sums, dk + i);
  }
}

// dQ_read in dq, dK_read in dk, U dŜᵀ in gradient.writes, B in gradient.reads; without division the pairs are missing.
template <int kKeyParts, class T>
HWY_NOINLINE void decayed_key_gradients(std::int64_t key_dim, float scale, Scratch& s, float* dq, float* dk) {
  constexpr int kParts = kStateParts<T>;
  for (std::int64_t i = 0; i < key_dim; i += 2 * kTileRows) {
    const std::int64_t block = i / kTileRows;
    zero_sums();
    add_products<kParts, kOutParts<T>>(s.state, block, s.dout_t_right, 0, s.ahead);
    if (s.divided) add_products<kKeyParts, kParts, Product::exact>(s.write_keys_t, block, s.dp_t_right, 0, s.ahead);
    store_gradient(scale, key_dim, s.sums, dq + i);
    zero_sums();
    add_products<kParts, kParts>(s.state, block, s.g_t_right, 0, s.ahead);
    if (s.divided) add_products<kKeyParts, kParts, Product::exact>(s.write_keys_t, block, s.dl_t_right, 0, s.ahead);
    store_gradient(scale, key_dim, s.sums, dk + i);
    zero_sums();
    add_products<kParts, kParts>(s.dstate, block, s.u_t_right, 0, s.ahead);
    store_gradient(scale, key_dim, s.sums, s.gradient.writes + i);
    if (!s.divided) continue;
    zero_sums();
    add_products<kKeyParts, kParts, Product::exact>(s.queries_t, block, s.dp_right, 0, s.ahead);
    add_products<kKeyParts, kParts, Product::exact>(s.keys_t, block, s.dl_right, 0, s.ahead);
    store_gradient(scale, key_dim, s.sums, s.gradient.reads + i);
  }
}

// From the gradients of K_read, Q_read and K_write those of q and k, in place, and x and y. For pairs to cancel in x
// their factors must be the parts that were multiplied, and products of parts as exact as these.
template <int kKeyParts>
HWY_NOINLINE void finish_decayed_keys(std::int64_t tokens, const Scratch& s, float* dqs, float* dks) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  const DecayGradient& gradient = s.gradient;
  for (float* rows : {gradient.half_reads, gradient.half_writes}) {
    std::fill_n(rows, kHalfChunk * c.key_stride, 0.0F);
  }
  std::fill_n(gradient.dg, kChunk * c.key_stride, 0.0F);
  const auto parts = [](FloatVec x) HWY_ATTR { return FloatVec{sum_of_parts<kKeyParts>(x.raw)}; };
  for (std::int64_t i = 0; i < tokens * c.key_stride; i += kLanes) {
    const FloatVec q = hn::Load(d, c.q + i), k = hn::Load(d, c.k + i), read = hn::Load(d, c.decay.prefix + i);
    const FloatVec dq_read = hn::Load(d, dqs + i), dk_read = hn::Load(d, dks + i);
    const FloatVec through = hn::Load(d, gradient.writes + i);
    FloatVec x = hn::MulAdd(parts(hn::Mul(q, read)), dq_read, hn::Mul(parts(hn::Mul(k, read)), dk_read));
    FloatVec dq = hn::Mul(read, dq_read), dk = hn::Mul(read, dk_read);
    if (s.divided) {
      const FloatVec pairs = hn::Load(d, gradient.reads + i), diagonal = hn::Set(d, s.diagonal[i / c.key_stride]);
      const FloatVec k_write = hn::Div(k, read);
      x = hn::NegMulAdd(parts(k_write), pairs, x);
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

// The end of dβ, and its share of dk.
template <class T>
HWY_INLINE void finish_chunk(const DeltaBackward<T>& p, const ChunkPlace& at, float scale, const Scratch& s,
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

// dg of a chunk with a decay per head.
template <class T>
HWY_INLINE void finish_scalar_decay(const DeltaBackward<T>& p, const ChunkPlace& at, float scale, const Scratch& s) {
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

// Asks for what the chunk at `next` reads and writes, and for the state before it.
template <Decay kDecay, class T>
HWY_INLINE void look_ahead(const DeltaBackward<T>& p, const ChunkPlace& next, std::int64_t saved, RowsAhead& ahead) {
  ahead.clear();
  const std::int64_t i_b = next.i_b, t = next.start, tokens = next.tokens, i_q = next.i_q, i_h = next.i_h;
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  if (kDecay == Decay::channel && p.g.stride[3] == 1) {
    ahead.add(p.g.at(i_b, t, i_h), p.g.stride[1], tokens, key_dim);
  }
  if (p.q.stride[3] == 1) ahead.add(p.q.at(i_b, t, i_q), p.q.stride[1], tokens, key_dim);
  if (p.k.stride[3] == 1) ahead.add(p.k.at(i_b, t, i_q), p.k.stride[1], tokens, key_dim);
  if (p.v.stride[3] == 1) ahead.add(p.v.at(i_b, t, i_h), p.v.stride[1], tokens, value_dim);
  if (p.dout.stride[3] == 1) ahead.add(p.dout.at(i_b, t, i_h), p.dout.stride[1], tokens, value_dim);
  if (p.dq.stride[3] == 1) ahead.add(p.dq.at(i_b, t, i_q), p.dq.stride[1], tokens, key_dim);
  if (p.dk.stride[3] == 1) ahead.add(p.dk.at(i_b, t, i_q), p.dk.stride[1], tokens, key_dim);
  if (p.dv.stride[3] == 1) ahead.add(p.dv.at(i_b, t, i_h), p.dv.stride[1], tokens, value_dim);
  if (p.chunk_states.stride[4] == 1) {
    ahead.add(p.chunk_states.at(i_b, saved, i_h), p.chunk_states.stride[3], key_dim, value_dim);
  }
  if (kDecay == Decay::channel && p.dg.stride[3] == 1) {
    ahead.add(p.dg.at(i_b, t, i_h), p.dg.stride[1], tokens, key_dim);
  }
}

// One chunk of one value head: dq and dk get its share; dstate goes from the state after the chunk to the one before.
template <Decay kDecay, int kKeyParts, class T>
void chunk_of_head(const DeltaBackward<T>& p, const ChunkPlace& at, const Sequence& sequence, float scale,
                   float* dstate, Scratch& s, float* dq, float* dk) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t saved = sequence.chunk(at.start), rest = (kChunk - at.tokens) * kPanel;
  load_keys<kDecay, kKeyParts>(p, at, s);
  load_values(p.v, at, 0, value_dim, 1.0F, s.values);
  load_values(p.dout, at, 0, value_dim, 1.0F, s.dout);
  for (std::int64_t v = 0; v < value_dim; v += kPanel) {
    for (float* panels : {s.values, s.dout}) std::fill_n(panels + v * kChunk + at.tokens * kPanel, rest, 0.0F);
    value_panel<kDecay, kKeyParts>(p, at, saved, v, scale, dstate + v * key_dim, s);
  }
  store_values(s.values, at, 0, value_dim, scale, p.dv);
  score_gradients<kDecay, T>(scale, s);
  if constexpr (kDecay == Decay::channel) {
    decayed_key_gradients<kKeyParts, T>(key_dim, scale, s, dq, dk);
    finish_decayed_keys<kKeyParts>(at.tokens, s, dq, dk);
    finish_decay(p, at, s.chunk.decay, s.gradient);
  } else {
    key_gradients<kDecay, kKeyParts, T>(key_dim, scale, s, dq, dk);
  }
  finish_chunk(p, at, scale, s, dk);
  if constexpr (kDecay == Decay::scalar) finish_scalar_decay(p, at, scale, s);
}

// dq and dk of a chunk's tokens from their sums over value heads, through the L2 norm, and out.
template <class T>
HWY_INLINE void store_keys(const DeltaBackward<T>& p, const ChunkPlace& at, const Scratch& s, float* dq, float* dk) {
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    finish_keys(p, at, r, s.chunk, dq + r * p.shape.key_dim, dk + r * p.shape.key_dim);
  }
}

HWY_INLINE void scale_state(float* state, std::int64_t count, float by) {
  for (std::int64_t i = 0; i < count; ++i) state[i] *= by;
}

// dS after the last token of a value head, divided by the scale; dS before the first, times it.
template <class T>
HWY_INLINE void load_final(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_h, float scale,
                           std::int64_t state_floats, float* dstate) {
  load_state_panels(p.dfinal_state, 0, p.shape.value_dim, p.shape.key_dim, dstate, n, i_h);
  if (p.dfinal_state) scale_state(dstate, state_floats, 1.0F / scale);
}
template <class T>
HWY_INLINE void store_initial(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_h, float scale,
                              std::int64_t state_floats, float* dstate) {
  if (p.dinitial_state) scale_state(dstate, state_floats, scale);
  store_state_panels(dstate, p.dinitial_state, 0, p.shape.value_dim, p.shape.key_dim, n, i_h);
}

// Query heads [part.head, part.head_end) of a sequence with all of their value heads, chunk by chunk and within a chunk
// head by head: rows of neighbouring heads lie beside each other in memory.
template <class T, int kKeyParts, Decay kDecay>
void BackwardPart(const DeltaBackward<T>& p, const HeadsPart& part, std::byte* memory) {
  const TilesInUse tiles;
  Arena arena(memory);
  HeadsScratch s(arena, p.shape, p.rule.decay, part.head_end - part.head);
  const Sequence sequence = sequence_of(p, part.n);
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim, group = p.shape.group();
  const std::int64_t head = part.head * group, head_end = part.head_end * group;  // value heads
  const auto scale = static_cast<float>(p.rule.scale_for(key_dim));
  const auto dstate = [&](std::int64_t i_h) { return s.dstate + (i_h - head) * s.state_floats; };
  for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
    load_final(p, part.n, i_h, scale, s.state_floats, dstate(i_h));
  }
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t start = sequence.begin + (chunks - 1) * kChunk; start >= sequence.begin; start -= kChunk) {
    for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
      const ChunkPlace at(p.shape, sequence, i_h, start);
      const bool more_heads = i_h + 1 < head_end, first_of_group = i_h % group == 0;
      const std::int64_t next = more_heads ? start : start - kChunk;
      s.chunk.ahead.clear();
      if (next >= sequence.begin) {
        look_ahead<kDecay>(p, {p.shape, sequence, more_heads ? i_h + 1 : head, next}, sequence.chunk(next),
                           s.chunk.ahead);
      }
      float *dq = s.parts + (first_of_group ? 0 : s.part_floats), *dk = dq + s.part_floats / 2;
      chunk_of_head<kDecay, kKeyParts>(p, at, sequence, scale, dstate(i_h), s.chunk, dq, dk);
      if (!first_of_group) add_rows(s.parts + s.part_floats, s.part_floats, s.parts);
      if ((i_h + 1) % group == 0) store_keys(p, at, s.chunk, s.parts, s.parts + s.part_floats / 2);
    }
  }
  for (std::int64_t i_h = head; i_h < head_end; ++i_h) {
    store_initial(p, part.n, i_h, scale, s.state_floats, dstate(i_h));
  }
}

// The value heads of one query head, shared out to threads chunk by chunk.
struct GroupScratch {
  std::int64_t state_floats, part_floats;
  float* dstate;  // for each value head panels [K, kPanel] of dS
  float* parts;   // for each value head [2 kChunk, Kp] dq and dk
  std::byte* members;
  std::size_t member_bytes;  // of a thread's Scratch

  GroupScratch(Arena& arena, const DeltaShape& shape, Decay decay, int threads)
      : state_floats(shape.key_dim * round_up(shape.value_dim, kPanel)), part_floats(2 * kChunk * shape.key_dim) {
    dstate = arena.floats(shape.group() * state_floats);
    parts = arena.floats(shape.group() * part_floats);
    Arena member;
    Scratch().lay_out(member, shape, decay, kStateParts<float>);
    member_bytes = member.bytes();
    members =
        reinterpret_cast<std::byte*>(arena.floats(static_cast<std::int64_t>(member_bytes / sizeof(float)) * threads));
  }
  Scratch member(const DeltaShape& shape, Decay decay, int i) const {
    Arena arena(members + member_bytes * static_cast<std::size_t>(i));
    Scratch s;
    s.lay_out(arena, shape, decay, kStateParts<float>);
    return s;
  }
};

// Query head i_q of sequence n with all of its value heads, by all threads of the pool. dq and dk are summed in the
// order of the heads, as one thread does.
template <class T, int kKeyParts, Decay kDecay>
void BackwardGroup(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, ThreadPool& pool) {
  Arena arena(memory);
  const GroupScratch s(arena, p.shape, p.rule.decay, pool.threads());
  const Sequence sequence = sequence_of(p, n);
  const std::int64_t group = p.shape.group(), head = i_q * group;
  const auto scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  const auto dstate = [&](std::int64_t i) { return s.dstate + i * s.state_floats; };
  for (std::int64_t i = 0; i < group; ++i) load_final(p, n, head + i, scale, s.state_floats, dstate(i));
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t start = sequence.begin + (chunks - 1) * kChunk; start >= sequence.begin; start -= kChunk) {
    int with_keys = 0;  // a thread that has loaded the chunk's keys
    pool.run(group, [&](std::int64_t i, int thread) HWY_ATTR {
      const TilesInUse tiles;
      Scratch scratch = s.member(p.shape, p.rule.decay, thread);
      const ChunkPlace at(p.shape, sequence, head + i, start);
      const std::int64_t next = start - kChunk;
      if (next >= sequence.begin) {
        look_ahead<kDecay>(p, {p.shape, sequence, head + i, next}, sequence.chunk(next), scratch.ahead);
      }
      float* dq = s.parts + i * s.part_floats;
      chunk_of_head<kDecay, kKeyParts>(p, at, sequence, scale, dstate(i), scratch, dq, dq + s.part_floats / 2);
      if (i == 0) with_keys = thread;
    });
    for (std::int64_t i = 1; i < group; ++i) add_rows(s.parts + i * s.part_floats, s.part_floats, s.parts);
    store_keys(p, {p.shape, sequence, head, start}, s.member(p.shape, p.rule.decay, with_keys), s.parts,
               s.parts + s.part_floats / 2);
  }
  for (std::int64_t i = 0; i < group; ++i) store_initial(p, n, head + i, scale, s.state_floats, dstate(i));
}

// The kernels of a rule.
template <class T>
struct Backward {
  void (*part)(const DeltaBackward<T>& p, const HeadsPart& part, std::byte* memory);
  void (*group)(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, ThreadPool& pool);
};

template <class T, int kKeyParts, Decay kDecay>
constexpr Backward<T> kBackward = {BackwardPart<T, kKeyParts, kDecay>, BackwardGroup<T, kKeyParts, kDecay>};

template <class T, int kKeyParts>
Backward<T> backward_with(Decay decay) {
  if constexpr (kKeyParts > 1) {
    if (decay == Decay::channel) return kBackward<T, kKeyParts, Decay::channel>;
  }
  return decay == Decay::none ? kBackward<T, kKeyParts, Decay::none> : kBackward<T, kKeyParts, Decay::scalar>;
}

Backward<float> backward_of(const DeltaRule& rule, float) { return backward_with<float, 3>(rule.decay); }

// Keys are exact in one part where neither the norm nor a decay of channels changes them.
Backward<bfloat16> backward_of(const DeltaRule& rule, bfloat16) {
  if (rule.qk_l2norm || rule.decay == Decay::channel) return backward_with<bfloat16, 2>(rule.decay);
  return backward_with<bfloat16, 1>(rule.decay);
}

}  // namespace

std::size_t AmxBwdBytes(const DeltaShape& shape, Decay decay, std::int64_t query_heads) {
  Arena arena;
  const HeadsScratch scratch(arena, shape, decay, query_heads);
  return arena.bytes();
}

std::size_t AmxBwdGroupBytes(const DeltaShape& shape, Decay decay, int threads) {
  Arena arena;
  const GroupScratch scratch(arena, shape, decay, threads);
  return arena.bytes();
}

template <class T>
void AmxBwdPart(const DeltaBackward<T>& p, const HeadsPart& part, std::byte* memory) {
  backward_of(p.rule, T()).part(p, part, memory);
}

template <class T>
void AmxBwdGroup(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, ThreadPool& pool) {
  backward_of(p.rule, T()).group(p, n, i_q, memory, pool);
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3

#if HWY_ONCE
namespace efla::cpu {

#if HWY_TARGETS & HWY_AVX3
bool amx_takes_backward(const DeltaShape& shape, const DeltaRule& rule) {
  const double scale = std::abs(rule.scale_for(shape.key_dim));
  return amx_takes(shape) && scale > 1e-20 && scale < 1e20;
}

namespace {

// Shared out are query heads,
DeltaShape query_heads_alone(DeltaShape shape) {
  shape.value_heads = shape.heads;
  return shape;
}

// but where these are so few that a thread would be longer at its own, the value heads of one after the other.
bool shares_out_groups(const DeltaShape& shape, int threads) {
  const std::int64_t heads = shape.sequences() * shape.heads, rounds = (shape.group() + threads - 1) / threads;
  return heads < threads && heads * rounds < shape.group();
}

}  // namespace

std::size_t amx_chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  if (shares_out_groups(shape, threads)) return N_AVX3::AmxBwdGroupBytes(shape, rule.decay, threads);
  return N_AVX3::AmxBwdBytes(shape, rule.decay, heads_together(query_heads_alone(shape), threads)) *
         static_cast<std::size_t>(threads);
}

template <class T>
void amx_chunk_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  if (!shares_out_groups(p.shape, pool.threads())) {
    return for_each_part(query_heads_alone(p.shape), 1, workspace, pool,
                         [&](const HeadsPart& part, std::byte* memory) { N_AVX3::AmxBwdPart(p, part, memory); });
  }
  for (std::int64_t i = 0; i < p.shape.sequences() * p.shape.heads; ++i) {
    N_AVX3::AmxBwdGroup(p, i / p.shape.heads, i % p.shape.heads, workspace.data, pool);
  }
}
#else
bool amx_takes_backward(const DeltaShape&, const DeltaRule&) { return false; }
std::size_t amx_chunk_bwd_workspace_bytes(const DeltaShape&, const DeltaRule&, int) { return 0; }
template <class T>
void amx_chunk_bwd(const DeltaBackward<T>&, Workspace, ThreadPool&) {}
#endif

template void amx_chunk_bwd(const DeltaBackward<float>&, Workspace, ThreadPool&);
template void amx_chunk_bwd(const DeltaBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
