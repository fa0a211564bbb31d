// The chunkwise backward. Per chunk, with the forward's U, E (e_r = S_{r−1}ᵀ k_r), P, L and S recomputed from the state
// saved before the chunk, and dS the gradient with respect to the state after it:
//
//   dU = scale Pᵀ dO + K dS,   (I + diag(a) L)ᵀ dR = dU,   G = −diag(a) dR
//   dV = diag(b) dR,   db = rowsum(V ∘ dR),   da = −rowsum(E ∘ dR)
//   dP = scale tril(dO Uᵀ),   dL = stril(G Uᵀ)
//   dQ = scale dO Sᵀ + dP K,   dK = U dSᵀ + G Sᵀ + dPᵀ Q + (dL + dLᵀ) K
//   dS ← dS + scale Qᵀ dO + Kᵀ G
//
// and then through the gains a(β, λ), b(β, λ) with λ = ‖k‖², and through the L2 norm. With a decay, Q and K beside S or
// dS carry its products (chunk-inl.h) and so do the gradients that come from there; what lies inside the chunk goes
// through L's and P's own factors. The gradient of g_t gathers every term whose product of decays holds d_t: z (from
// before the chunk to after it) + Σ_{r≥t} x_r (from before to row r) + Σ_{j<t} y_j (from row j to after) + the pairs r
// ≥ t > j. docs/equations.md derives it.
#include "efla/cpu/delta.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/chunk_bwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// What the gradient of g is gathered from.
struct DecayGradient {
  float* state_sums = nullptr;   // for each panel [K, kLanes]: sums of dS ∘ S over its columns
  float* reads = nullptr;        // [kChunk, Kp] x: what meets the state before the chunk
  float* writes = nullptr;       // [kChunk, Kp] y: what enters the state after it
  float* half_reads = nullptr;   // channel: [kHalfChunk, Kp] rows of the second half with those of the first
  float* half_writes = nullptr;  // channel: [kHalfChunk, Kp] rows of the first half with those of the second
  float* dg = nullptr;           // [kChunk, Kp]
  float* pairs = nullptr;        // scalar: [2 kChunk, kChunk] dP ∘ P, then dL ∘ L

  void lay_out(Arena& arena, std::int64_t stride, std::int64_t state_rows) {
    state_sums = arena.floats(state_rows * kLanes);
    for (float** rows : {&reads, &writes, &dg}) *rows = arena.floats(kChunk * stride);
    for (float** rows : {&half_reads, &half_writes}) *rows = arena.floats(kHalfChunk * stride);
    pairs = arena.floats(2 * kChunk * kChunk);
  }
};

// Arrays over value columns are lists of panels. Vp, Kp: V and K rounded up to whole panels.
struct BwdScratch {
  std::int64_t key_dim = 0;
  ChunkScratch chunk;
  float* state = nullptr;     // panels [K, kPanel] of S before the chunk
  float* dstate = nullptr;    // for each value head of the query head panels [K, kPanel] of dS
  float* state_t = nullptr;   // Sᵀ: key panels of [Vp, kPanel]
  float* dstate_t = nullptr;  // dSᵀ after the chunk: key panels of [Vp, kPanel]
  float* errors = nullptr;    // for each thread that works on the head [kChunk, kPanel]: E
  float* values = nullptr;    // panels [kChunk, kPanel]: V, then dV
  float* u = nullptr;         // panels [kChunk, kPanel]
  float* u_t = nullptr;       // Uᵀ: token panels of [Vp, kPanel]
  float* dout = nullptr;      // panels [kChunk, kPanel]: scale · dO
  float* g = nullptr;         // panels [kChunk, kPanel]: G
  float* da = nullptr;        // for each panel [kChunk, kLanes]: partial sums
  float* db = nullptr;        // for each panel [kChunk, kLanes]
  float* dscores = nullptr;   // [2 kChunk, kChunk]: dP, zero above the diagonal, then dL + dLᵀ
  float* dq = nullptr;        // [kChunk, Kp]
  float* dk = nullptr;        // [kChunk, Kp]
  float* dq_sum = nullptr;    // [kChunk, Kp] over the value heads of the query head; dq where that has one alone
  float* dk_sum = nullptr;    // [kChunk, Kp] likewise
  DecayGradient decay;        // laid out only where the rule has a decay

  void lay_out(Arena& arena, const DeltaShape& shape, Decay kind, int team) {
    chunk.lay_out(arena, shape, kind);
    key_dim = shape.key_dim;
    const std::int64_t padded_keys = round_up(key_dim, kPanel), padded_values = round_up(shape.value_dim, kPanel);
    errors = arena.floats(team * kChunk * kPanel);
    state = arena.floats(key_dim * padded_values);
    dstate = arena.floats(shape.group() * key_dim * padded_values);
    for (float** t : {&state_t, &dstate_t}) *t = arena.floats(padded_keys * padded_values);
    for (float** panels : {&values, &u, &dout, &g}) *panels = arena.floats(kChunk * padded_values);
    u_t = arena.floats(round_up(kChunk, kPanel) * padded_values);
    for (float** sums : {&da, &db}) *sums = arena.floats(padded_values / kPanel * kChunk * kLanes);
    dscores = arena.floats(2 * kChunk * kChunk);
    for (float** rows : {&dq, &dk}) *rows = arena.floats(kChunk * padded_keys);
    dq_sum = dq;
    dk_sum = dk;
    if (shape.group() > 1) {
      for (float** rows : {&dq_sum, &dk_sum}) *rows = arena.floats(kChunk * padded_keys);
    }
    if (kind != Decay::none) decay.lay_out(arena, padded_keys, key_dim * padded_values / kPanel);
  }
};

std::size_t BwdBytesPerWorker(const DeltaShape& shape, Decay decay) {
  Arena arena;
  BwdScratch().lay_out(arena, shape, decay, 1);
  return arena.bytes();
}

// One panel of dR by backward substitution, and from it dV, G and the panel's part of da and db.
struct ReverseSubstitutionTiles {
  const ChunkScratch& c;
  std::int64_t key_dim, tokens;
  const float* dstate;  // [K, kPanel] after the chunk
  const float* errors;  // [kChunk, kPanel]
  float* values;        // [kChunk, kPanel]: v, overwritten by dV
  const float* dout;    // [kChunk, kPanel]
  float* g;             // [kChunk, kPanel]
  float* da_sums;       // [kChunk, kLanes]
  float* db_sums;       // [kChunk, kLanes]

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const FloatTag d;
    const float* p = c.p_scores() + r;
    const float* l = c.l_scores() + r;
    const std::int64_t below = r + M;  // rows from here on are done
    Tile<M> tile;
    tile.zero();
    tile.multiply_add(c.k_write + r * c.key_stride, c.key_stride, 1, dstate, kPanel, key_dim);
    tile.multiply_add(p + below * kChunk, 1, kChunk, dout + below * kPanel, kPanel, tokens - below);
    tile.multiply_add(l + below * kChunk, 1, kChunk, g + below * kPanel, kPanel, tokens - below);
    unroll<M>([&](auto from_end) EFLA_UNROLLED {
      constexpr int m = M - 1 - from_end;
      const std::int64_t at = (r + m) * kPanel;
      const FloatVec o0 = hn::Load(d, dout + at);
      const FloatVec o1 = hn::Load(d, dout + at + kLanes);
      tile.add(m, p[(r + m) * kChunk + m], o0, o1);
      const FloatVec dr0 = tile.acc[m][0];
      const FloatVec dr1 = tile.acc[m][1];
      finish_row(r + m, dr0, dr1);
      const FloatVec a = hn::Set(d, -c.erase[r + m]);
      const FloatVec g0 = hn::Mul(a, dr0);
      const FloatVec g1 = hn::Mul(a, dr1);
      hn::Store(g0, d, g + at);
      hn::Store(g1, d, g + at + kLanes);
      unroll<m>([&](auto above) EFLA_UNROLLED {
        tile.add(above, p[(r + m) * kChunk + above], o0, o1);
        tile.add(above, l[(r + m) * kChunk + above], g0, g1);
      });
    });
  }

  // dV, and the row's share of da and db.
  HWY_INLINE void finish_row(std::int64_t row, FloatVec dr0, FloatVec dr1) {
    const FloatTag d;
    const std::int64_t at = row * kPanel;
    const FloatVec da = hn::Neg(hn::Mul(hn::Load(d, errors + at), dr0));
    const FloatVec db = hn::Mul(hn::Load(d, values + at), dr0);
    hn::Store(hn::NegMulAdd(hn::Load(d, errors + at + kLanes), dr1, da), d, da_sums + row * kLanes);
    hn::Store(hn::MulAdd(hn::Load(d, values + at + kLanes), dr1, db), d, db_sums + row * kLanes);
    const FloatVec b = hn::Set(d, c.write[row]);
    hn::Store(hn::Mul(b, dr0), d, values + at);
    hn::Store(hn::Mul(b, dr1), d, values + at + kLanes);
  }
};

// One panel of dS ← D dS + scale Q_readᵀ dO + K_readᵀ G, D the decays of the whole chunk.
struct StateGradientTiles {
  const ChunkScratch& c;
  std::int64_t tokens;
  const float* dout;  // [kChunk, kPanel]
  const float* g;     // [kChunk, kPanel]
  float* dstate;      // [K, kPanel]

  template <int M>
  HWY_INLINE void run(std::int64_t i) {
    Tile<M> tile;
    tile.load(dstate + i * kPanel);
    if (c.decay.whole != nullptr) tile.scale_rows(c.decay.whole + i);
    tile.multiply_add(c.q_read + i, 1, c.key_stride, dout, kPanel, tokens);
    tile.multiply_add(c.k_read + i, 1, c.key_stride, g, kPanel, tokens);
    tile.store(dstate + i * kPanel);
  }
};

// Rows of `left` · Uᵀ, all columns that the lower triangle needs; left is dO or G as panels.
struct ScoreGradientTiles {
  const BwdScratch& s;
  std::int64_t padded_values;
  const float* left;  // panels [kChunk, kPanel]
  float* out;         // [kChunk, kChunk]

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    for (std::int64_t column = 0; column < r + M; column += kPanel) {
      Tile<M> tile;
      tile.zero();
      for (std::int64_t v = 0; v < padded_values; v += kPanel) {
        tile.multiply_add(left + v * kChunk + r * kPanel, kPanel, 1, s.u_t + column * padded_values + v * kPanel,
                          kPanel, kPanel);
      }
      tile.store(out + r * kChunk + column, kChunk);
    }
  }
};

// One key panel of dQ = scale dO Sᵀ + dP K. With a decay the first term carries its products, and with one per channel
// the second is left to channel_pairs.
struct QueryGradientTiles {
  const BwdScratch& s;
  std::int64_t padded_values, key;  // key: first column of the panel

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const ChunkScratch& c = s.chunk;
    const std::int64_t at = r * c.key_stride + key;
    Tile<M> tile;
    tile.zero();
    for (std::int64_t v = 0; v < padded_values; v += kPanel) {
      tile.multiply_add(s.dout + v * kChunk + r * kPanel, kPanel, 1, s.state_t + key * padded_values + v * kPanel,
                        kPanel, kPanel);
    }
    if (c.decay.kind != Decay::none) {
      tile.multiply(c.decay.prefix + at, c.key_stride);
      tile.template store_product<false>(c.q + at, s.decay.reads + at, c.key_stride);
    }
    if (c.decay.kind != Decay::channel) {
      tile.multiply_add(s.dscores + r * kChunk, kChunk, 1, c.k + key, c.key_stride, r + M);
    }
    tile.store(s.dq + at, c.key_stride);
  }
};

// One key panel of dK = U dSᵀ + G Sᵀ + dPᵀ Q + (dL + dLᵀ) K, with decays as QueryGradientTiles.
struct KeyGradientTiles {
  const BwdScratch& s;
  std::int64_t padded_values, tokens, key;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const ChunkScratch& c = s.chunk;
    const std::int64_t at = r * c.key_stride + key;
    Tile<M> tile;
    tile.zero();
    if (c.decay.kind == Decay::none) {
      for (std::int64_t v = 0; v < padded_values; v += kPanel) {
        const std::int64_t rows = v * kChunk + r * kPanel;
        const std::int64_t columns = key * padded_values + v * kPanel;
        tile.multiply_add(s.u + rows, kPanel, 1, s.dstate_t + columns, kPanel, kPanel);
        tile.multiply_add(s.g + rows, kPanel, 1, s.state_t + columns, kPanel, kPanel);
      }
    } else {
      state_product(s.g, s.state_t, r, tile);
      tile.multiply(c.decay.prefix + at, c.key_stride);
      tile.template store_product<true>(c.k + at, s.decay.reads + at, c.key_stride);
      tile.store(s.dk + at, c.key_stride);
      tile.zero();
      state_product(s.u, s.dstate_t, r, tile);
      tile.multiply(c.decay.suffix + at, c.key_stride);
      tile.template store_product<false>(c.k + at, s.decay.writes + at, c.key_stride);
      tile.add_rows(s.dk + at, c.key_stride);
    }
    if (c.decay.kind != Decay::channel) {
      tile.multiply_add(s.dscores + r * kChunk + r, 1, kChunk, c.q + r * c.key_stride + key, c.key_stride, tokens - r);
      tile.multiply_add(s.dscores + (kChunk + r) * kChunk, kChunk, 1, c.k + key, c.key_stride, tokens);
    }
    tile.store(s.dk + at, c.key_stride);
  }

  // tile += rows r … of `left` times the transposed state.
  template <int M>
  HWY_INLINE void state_product(const float* left, const float* right, std::int64_t r, Tile<M>& tile) {
    for (std::int64_t v = 0; v < padded_values; v += kPanel) {
      tile.multiply_add(left + v * kChunk + r * kPanel, kPanel, 1, right + key * padded_values + v * kPanel, kPanel,
                        kPanel);
    }
  }
};

// Channel decay, one key panel: the pairs of a row of the second half with one of the first. Their gradients go through
// q_half, k_half and k_tail (chunk-inl.h).
struct SecondHalfTiles {
  const BwdScratch& s;
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
    tile.template store_product<true>(c.k + at, s.decay.half_reads + half, c.key_stride);
    tile.add_rows(s.dk + at, c.key_stride);
    tile.store(s.dk + at, c.key_stride);
  }
};

struct FirstHalfTiles {
  const BwdScratch& s;
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

// Channel decay, one key panel: the pairs first ≤ j ≤ r < last, one by one. w is the product of the decays between
// them.
HWY_INLINE void channel_pairs(const BwdScratch& s, std::int64_t key, std::int64_t first, std::int64_t last) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  const std::int64_t n = c.key_stride;
  HWY_ALIGN float weights[kHalfChunk * kLanes];
  for (std::int64_t i = key; i < key + kPanel; i += kLanes) {
    for (std::int64_t r = first; r < last; ++r) {
      const float* dp = s.dscores + r * kChunk;
      const float* dl = dp + kChunk * kChunk;
      const FloatVec q = hn::Load(d, c.q + r * n + i), k = hn::Load(d, c.k + r * n + i);
      const FloatVec diagonal = hn::Set(d, dp[r]);
      FloatVec dq = hn::MulAdd(diagonal, k, hn::Load(d, s.dq + r * n + i));
      FloatVec dk = hn::MulAdd(diagonal, q, hn::Load(d, s.dk + r * n + i));
      FloatVec w = hn::Load(d, c.decay.token + r * n + i);
      for (std::int64_t j = r - 1; j >= first; --j) {
        hn::Store(w, d, weights + (j - first) * kLanes);
        const FloatVec x = hn::Mul(w, hn::Load(d, c.k + j * n + i));
        dq = hn::MulAdd(hn::Set(d, dp[j]), x, dq);
        dk = hn::MulAdd(hn::Set(d, dl[j]), x, dk);
        w = hn::Mul(w, hn::Load(d, c.decay.token + j * n + i));
      }
      hn::Store(dq, d, s.dq + r * n + i);
      hn::Store(dk, d, s.dk + r * n + i);
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

// Sums of dS ∘ S over the columns of one panel, before dS moves on.
HWY_INLINE void state_sums(const float* state, const float* dstate, std::int64_t key_dim, float* sums) {
  const FloatTag d;
  for (std::int64_t i = 0; i < key_dim; ++i) {
    const FloatVec left = hn::Mul(hn::Load(d, state + i * kPanel), hn::Load(d, dstate + i * kPanel));
    const FloatVec right = hn::Load(d, state + i * kPanel + kLanes);
    hn::Store(hn::MulAdd(right, hn::Load(d, dstate + i * kPanel + kLanes), left), d, sums + i * kLanes);
  }
}

// Share `share` of `shares` of what the chunk at `start` reads.
template <class T>
HWY_INLINE void prefetch_chunk(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t start, std::int64_t saved,
                               std::int64_t share, std::int64_t shares) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  for (std::int64_t t = start + kChunk * share / shares; t < start + kChunk * (share + 1) / shares; ++t) {
    prefetch_row(p.q.at(at.i_b, t, at.i_q), p.q.stride[3], key_dim);
    prefetch_row(p.k.at(at.i_b, t, at.i_q), p.k.stride[3], key_dim);
    prefetch_row(p.v.at(at.i_b, t, at.i_h), p.v.stride[3], value_dim);
    prefetch_row(p.dout.at(at.i_b, t, at.i_h), p.dout.stride[3], value_dim);
  }
  for (std::int64_t i = key_dim * share / shares; i < key_dim * (share + 1) / shares; ++i) {
    prefetch_row(p.chunk_states.at(at.i_b, saved, at.i_h, i), p.chunk_states.stride[4], value_dim);
  }
}

// Everything of one chunk that is done panel by panel of value columns.
template <class T>
HWY_INLINE void value_panel(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t first, float* dstates,
                            BwdScratch& s, float* errors) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t padded_values = round_up(value_dim, kPanel);
  const float* state = s.state + first * key_dim;
  float* dstate = dstates + first * key_dim;
  float* values = s.values + first * kChunk;
  const float* dout = s.dout + first * kChunk;
  float* u = s.u + first * kChunk;
  float* g = s.g + first * kChunk;

  for (std::int64_t i = 0; i < key_dim; i += kPanel) {
    const std::int64_t rows = std::min(kPanel, key_dim - i), column = i * padded_values + first * kPanel;
    transpose(state + i * kPanel, kPanel, rows, kPanel, s.state_t + column, kPanel);
    transpose(dstate + i * kPanel, kPanel, rows, kPanel, s.dstate_t + column, kPanel);
  }
  SubstitutionTiles<true> substitution{s.chunk, key_dim, state, values, u, errors};
  for_tiles(at.tokens, substitution);
  const std::int64_t sums = first / kPanel * kChunk * kLanes;
  ReverseSubstitutionTiles reverse{s.chunk, key_dim, at.tokens, dstate,      errors,
                                   values,  dout,    g,         s.da + sums, s.db + sums};
  for_tiles_reversed(at.tokens, reverse);
  if (s.chunk.decay.kind != Decay::none) {
    state_sums(state, dstate, key_dim, s.decay.state_sums + first / kPanel * key_dim * kLanes);
  }
  StateGradientTiles next{s.chunk, at.tokens, dout, g, dstate};
  for_tiles(key_dim, next);
  for (std::int64_t column = 0; column < at.tokens; column += kPanel) {
    transpose(u + column * kPanel, kPanel, std::min(kPanel, at.tokens - column), kPanel,
              s.u_t + column * padded_values + first * kPanel, kPanel);
  }
}

// dP (half 0) or dL + dLᵀ (half 1), with zeros where the triangle ends; with a scalar decay times its weights. With one
// per channel dL alone.
HWY_INLINE void score_gradient(std::int64_t half, std::int64_t tokens, std::int64_t padded_values, BwdScratch& s) {
  const FloatTag d;
  const ChunkDecay& decay = s.chunk.decay;
  float* out = s.dscores + half * kChunk * kChunk;
  ScoreGradientTiles tiles{s, padded_values, half == 0 ? s.dout : s.g, out};
  for_tiles(tokens, tiles);
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t j = half == 0 ? r + 1 : r; j < tokens; ++j) out[r * kChunk + j] = 0.0F;
    if (decay.kind != Decay::scalar) continue;
    for (std::int64_t j = r * kChunk; j <= r * kChunk + r; j += kLanes) {
      const FloatVec gradient = hn::Load(d, out + j);
      const std::int64_t score = half * kChunk * kChunk + j;
      hn::Store(hn::Mul(gradient, hn::Load(d, s.chunk.scores + score)), d, s.decay.pairs + score);
      hn::Store(hn::Mul(gradient, hn::Load(d, decay.weights + j)), d, out + j);
    }
  }
  if (half == 0 || decay.kind == Decay::channel) return;
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t j = r + 1; j < tokens; ++j) out[r * kChunk + j] = out[j * kChunk + r];
  }
}

// One key panel of dq, dk and what dg needs of it.
HWY_INLINE void key_panel(std::int64_t tokens, std::int64_t padded_values, std::int64_t key, BwdScratch& s) {
  QueryGradientTiles query{s, padded_values, key};
  for_tiles(tokens, query);
  KeyGradientTiles keys{s, padded_values, tokens, key};
  for_tiles(tokens, keys);
  if (s.chunk.decay.kind != Decay::channel) return;
  const std::int64_t rest = tokens - kHalfChunk;
  if (rest > 0) {
    SecondHalfTiles second{s, key};
    for_tiles(rest, second);
    FirstHalfTiles first{s, rest, key};
    for_tiles(kHalfChunk, first);
  }
  for (std::int64_t first = 0; first < tokens; first += kHalfChunk) {
    channel_pairs(s, key, first, std::min(first + kHalfChunk, tokens));
  }
}

// Scalar decay: Σ over r ≥ t > j of dP_rj P_rj + dL_rj L_rj for every token t > 0.
HWY_INLINE void scalar_pairs(std::int64_t tokens, const BwdScratch& s, float* sums) {
  float columns[kChunk] = {};  // Σ_{r≥t} of column j
  for (std::int64_t t = tokens - 1; t > 0; --t) {
    const float* pairs = s.decay.pairs + t * kChunk;
    for (std::int64_t j = 0; j < t; ++j) {
      columns[j] += pairs[j] + pairs[kChunk * kChunk + j];
      sums[t] += columns[j];
    }
  }
}

// dg of a chunk from its parts.
template <class T>
HWY_INLINE void finish_decay(const DeltaBackward<T>& p, const ChunkPlace& at, BwdScratch& s) {
  const FloatTag d;
  const ChunkDecay& decay = s.chunk.decay;
  const std::int64_t n = decay.key_stride, key_dim = p.shape.key_dim;
  const std::int64_t panels = round_up(p.shape.value_dim, kPanel) / kPanel;
  HWY_ALIGN float through[kPanel];
  float pair_sums[kChunk] = {};
  if (decay.kind == Decay::scalar) scalar_pairs(at.tokens, s, pair_sums);
  for (std::int64_t i = 0; i < n; i += kPanel) {
    for (std::int64_t channel = i; channel < i + kPanel; ++channel) {  // z
      FloatVec sum = hn::Zero(d);
      for (std::int64_t panel = 0; channel < key_dim && panel < panels; ++panel) {
        sum = hn::Add(sum, hn::Load(d, s.decay.state_sums + (panel * key_dim + channel) * kLanes));
      }
      through[channel - i] = decay.whole[channel] * hn::GetLane(hn::SumOfLanes(d, sum));
    }
    for (std::int64_t lanes = 0; lanes < kPanel; lanes += kLanes) {
      const std::int64_t column = i + lanes;
      FloatVec reads = hn::Load(d, through + lanes), half = hn::Zero(d);
      for (std::int64_t t = at.tokens - 1; t >= 0; --t) {
        const std::int64_t row = t * n + column;
        reads = hn::Add(reads, hn::Load(d, s.decay.reads + row));
        FloatVec dg = hn::Add(reads, hn::Load(d, s.decay.dg + row));
        if (decay.kind == Decay::channel && t >= kHalfChunk) {
          half = hn::Add(half, hn::Load(d, s.decay.half_reads + row - kHalfChunk * n));
          dg = hn::Add(dg, half);
        }
        hn::Store(dg, d, s.decay.dg + row);
      }
      FloatVec writes = hn::Zero(d);
      half = hn::Zero(d);
      const bool halves = decay.kind == Decay::channel && at.tokens > kHalfChunk;
      for (std::int64_t t = 1; t < at.tokens; ++t) {
        const std::int64_t row = t * n + column;
        writes = hn::Add(writes, hn::Load(d, s.decay.writes + row - n));
        FloatVec dg = hn::Add(writes, hn::Load(d, s.decay.dg + row));
        if (halves && t < kHalfChunk) {
          half = hn::Add(half, hn::Load(d, s.decay.half_writes + row - n));
          dg = hn::Add(dg, half);
        }
        hn::Store(dg, d, s.decay.dg + row);
      }
    }
  }
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    const float* row = s.decay.dg + r * n;
    float* out = p.dg.at(at.i_b, at.start + r, at.i_h);
    if (decay.kind == Decay::channel) {
      store_row(row, 1.0F, key_dim, out, p.dg.stride[3]);
    } else {
      FloatVec sum = hn::Zero(d);
      for (std::int64_t i = 0; i < n; i += kLanes) sum = hn::Add(sum, hn::Load(d, row + i));
      *out = hn::GetLane(hn::SumOfLanes(d, sum)) + pair_sums[r];
    }
  }
}

template <class T>
HWY_INLINE void finish_chunk(const DeltaBackward<T>& p, const ChunkPlace& at, BwdScratch& s) {
  const FloatTag d;
  const std::int64_t stride = s.chunk.key_stride;
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    FloatVec da = hn::Zero(d);
    FloatVec db = hn::Zero(d);
    for (std::int64_t v = 0; v < p.shape.value_dim; v += kPanel) {
      const std::int64_t sums = (v / kPanel * kChunk + r) * kLanes;
      da = hn::Add(da, hn::Load(d, s.da + sums));
      db = hn::Add(db, hn::Load(d, s.db + sums));
    }
    finish_gains(p, at, r, hn::GetLane(hn::SumOfLanes(d, da)), hn::GetLane(hn::SumOfLanes(d, db)), s.chunk,
                 s.dk + r * stride);
  }
  if (s.chunk.decay.kind != Decay::none) finish_decay(p, at, s);
}

// One chunk of one value head, its panels shared out to the threads of the pool. dq and dk get its share; dstate goes
// from the state after the chunk to the one before.
template <class T>
HWY_INLINE void chunk_of_head(const DeltaBackward<T>& p, const ChunkPlace& at, const Sequence& sequence, float* dstate,
                              BwdScratch& s, ThreadPool& pool) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t padded_values = round_up(value_dim, kPanel), panels = padded_values / kPanel;
  const std::int64_t saved = sequence.chunk(at.start);
  load_chunk(p, at, s.chunk);
  compute_scores(at, key_dim, s.chunk);
  load_state_panels(p.chunk_states, 0, value_dim, key_dim, s.state, at.i_b, saved, at.i_h);
  load_values(p.v, at, 0, value_dim, 1.0F, s.values);
  load_values(p.dout, at, 0, value_dim, static_cast<float>(p.rule.scale_for(key_dim)), s.dout);
  pool.run(panels, [&](std::int64_t panel, int member) HWY_ATTR {
    if (at.start > sequence.begin) prefetch_chunk(p, at, at.start - kChunk, saved - 1, panel, panels);
    value_panel(p, at, panel * kPanel, dstate, s, s.errors + member * kChunk * kPanel);
  });
  store_values(s.values, at, 0, value_dim, 1.0F, p.dv);
  pool.run(2, [&](std::int64_t half, int) HWY_ATTR { score_gradient(half, at.tokens, padded_values, s); });
  if (p.rule.decay != Decay::none) {
    std::fill_n(s.decay.dg, kChunk * s.chunk.key_stride, 0.0F);
  }
  pool.run(s.chunk.key_stride / kPanel,
           [&](std::int64_t panel, int) HWY_ATTR { key_panel(at.tokens, padded_values, panel * kPanel, s); });
  finish_chunk(p, at, s);
}

// Query head i_q of sequence n with all of its value heads, by the `team` threads of the pool; on the calling thread
// alone inside a task.
template <class T>
void ChunkBwdHead(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int team,
                  ThreadPool& pool) {
  Arena arena(memory);
  BwdScratch s;
  s.lay_out(arena, p.shape, p.rule.decay, team);
  std::fill_n(memory, arena.bytes(), std::byte{0});  // padding beyond K and V must hold finite numbers
  const Sequence sequence = sequence_of(p, n);
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim, group = p.shape.group();
  const std::int64_t state_floats = key_dim * round_up(value_dim, kPanel), stride = s.chunk.key_stride;
  for (std::int64_t i = 0; i < group; ++i) {
    load_state_panels(p.dfinal_state, 0, value_dim, key_dim, s.dstate + i * state_floats, n, i_q * group + i);
  }
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const std::int64_t start = sequence.begin + chunk * kChunk;
    const ChunkPlace first(p.shape, sequence, i_q * group, start);
    const std::int64_t count = first.tokens * stride;
    for (std::int64_t i = 0; i < group; ++i) {
      const ChunkPlace at(p.shape, sequence, i_q * group + i, start);
      chunk_of_head(p, at, sequence, s.dstate + i * state_floats, s, pool);
      if (group == 1) break;
      if (i == 0) {
        std::copy_n(s.dq, count, s.dq_sum);
        std::copy_n(s.dk, count, s.dk_sum);
      } else {
        add_rows(s.dq, count, s.dq_sum);
        add_rows(s.dk, count, s.dk_sum);
      }
    }
    for (std::int64_t r = 0; r < first.tokens; ++r) {
      finish_keys(p, first, r, s.chunk, s.dq_sum + r * stride, s.dk_sum + r * stride);
    }
  }
  for (std::int64_t i = 0; i < group; ++i) {
    store_state_panels(s.dstate + i * state_floats, p.dinitial_state, 0, value_dim, key_dim, n, i_q * group + i);
  }
}

void ChunkBwdHeadFloat(const DeltaBackward<float>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int team,
                       ThreadPool& pool) {
  ChunkBwdHead(p, n, i_q, memory, team, pool);
}

void ChunkBwdHeadBfloat16(const DeltaBackward<bfloat16>& p, std::int64_t n, std::int64_t i_q, std::byte* memory,
                          int team, ThreadPool& pool) {
  ChunkBwdHead(p, n, i_q, memory, team, pool);
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(ChunkBwdHeadFloat);
HWY_EXPORT(ChunkBwdHeadBfloat16);
HWY_EXPORT(BwdBytesPerWorker);

void head(const DeltaBackward<float>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int team,
          ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(ChunkBwdHeadFloat)(p, n, i_q, memory, team, pool);
}
void head(const DeltaBackward<bfloat16>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int team,
          ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(ChunkBwdHeadBfloat16)(p, n, i_q, memory, team, pool);
}

}  // namespace

std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return HWY_DYNAMIC_DISPATCH(BwdBytesPerWorker)(shape, rule.decay) * static_cast<std::size_t>(threads);
}

template <class T>
void chunk_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t heads = p.shape.sequences() * p.shape.heads;
  if (heads < pool.threads()) {
    // All threads on one head after the other. A team's scratch is less than that of as many single threads.
    for (std::int64_t i = 0; i < heads; ++i) {
      head(p, i / p.shape.heads, i % p.shape.heads, workspace.data, pool.threads(), pool);
    }
    return;
  }
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(pool.threads());
  pool.run(heads, [&](std::int64_t i, int worker) {
    head(p, i / p.shape.heads, i % p.shape.heads, workspace.data + bytes * static_cast<std::size_t>(worker), 1, pool);
  });
}

template void chunk_bwd(const DeltaBackward<float>&, Workspace, ThreadPool&);
template void chunk_bwd(const DeltaBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
