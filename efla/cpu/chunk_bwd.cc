// The chunkwise backward. Per chunk, with the forward's U, E (e_r = S_{r−1}ᵀ k_r), P, L and S recomputed from the state
// saved before the chunk, and dS the gradient with respect to the state after it:
//
//   dU = scale Pᵀ dO + K dS,   (I + diag(a) L)ᵀ dR = dU,   G = −diag(a) dR
//   dV = diag(b) dR,   db = rowsum(V ∘ dR),   da = −rowsum(E ∘ dR)
//   dP = scale tril(dO Uᵀ),   dL = stril(G Uᵀ)
//   dQ = scale dO Sᵀ + dP K,   dK = U dSᵀ + G Sᵀ + dPᵀ Q + (dL + dLᵀ) K
//   dS ← dS + scale Qᵀ dO + Kᵀ G
//
// and then through the gains a(β, λ), b(β, λ) with λ = ‖k‖², and through the L2 norm. docs/equations.md derives it.
#include "efla/cpu/delta.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/chunk_bwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Arrays over value columns are lists of panels. Vp, Kp: V and K rounded up to whole panels.
struct BwdScratch {
  ChunkScratch chunk;
  float* state = nullptr;     // one panel [K, kPanel]: S before the chunk
  float* dstate = nullptr;    // panels [K, kPanel] of dS
  float* state_t = nullptr;   // Sᵀ: key panels of [Vp, kPanel]
  float* dstate_t = nullptr;  // dSᵀ after the chunk: key panels of [Vp, kPanel]
  float* values = nullptr;    // one panel [kChunk, kPanel]
  float* errors = nullptr;    // one panel [kChunk, kPanel]: E
  float* dvalues = nullptr;   // one panel [kChunk, kPanel]
  float* u = nullptr;         // panels [kChunk, kPanel]
  float* u_t = nullptr;       // Uᵀ: token panels of [Vp, kPanel]
  float* dout = nullptr;      // panels [kChunk, kPanel]: scale · dO
  float* g = nullptr;         // panels [kChunk, kPanel]: G
  float* da = nullptr;        // [kChunk, kLanes] partial sums
  float* db = nullptr;        // [kChunk, kLanes]
  float* dscores = nullptr;   // [2 kChunk, kChunk]: dP, zero above the diagonal, then dL + dLᵀ
  float* dq = nullptr;        // [kChunk, Kp]
  float* dk = nullptr;        // [kChunk, Kp]

  void lay_out(Arena& arena, const DeltaShape& shape) {
    chunk.lay_out(arena, shape);
    const std::int64_t key_dim = shape.key_dim, padded_keys = round_up(key_dim, kPanel);
    const std::int64_t padded_values = round_up(shape.value_dim, kPanel);
    state = arena.floats(key_dim * kPanel);
    dstate = arena.floats(key_dim * padded_values);
    for (float** t : {&state_t, &dstate_t}) *t = arena.floats(padded_keys * padded_values);
    for (float** panel : {&values, &errors, &dvalues}) *panel = arena.floats(kChunk * kPanel);
    for (float** panels : {&u, &dout, &g}) *panels = arena.floats(kChunk * padded_values);
    u_t = arena.floats(round_up(kChunk, kPanel) * padded_values);
    for (float** sums : {&da, &db}) *sums = arena.floats(kChunk * kLanes);
    dscores = arena.floats(2 * kChunk * kChunk);
    for (float** rows : {&dq, &dk}) *rows = arena.floats(kChunk * padded_keys);
  }
};

std::size_t BwdBytesPerWorker(const DeltaShape& shape) {
  Arena arena;
  BwdScratch().lay_out(arena, shape);
  return arena.bytes();
}

// One panel of dR by backward substitution, and from it dV, G and the panel's part of da and db.
struct ReverseSubstitutionTiles {
  const BwdScratch& s;
  std::int64_t key_dim, tokens;
  const float* dstate;  // [K, kPanel] after the chunk
  const float* dout;    // [kChunk, kPanel]
  float* g;             // [kChunk, kPanel]

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const FloatTag d;
    const ChunkScratch& c = s.chunk;
    const float* p = c.p_scores() + r;
    const float* l = c.l_scores() + r;
    const std::int64_t below = r + M;  // rows from here on are done
    Tile<M> tile;
    tile.zero();
    tile.multiply_add(c.k + r * c.key_stride, c.key_stride, 1, dstate, kPanel, key_dim);
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
    const FloatVec b = hn::Set(d, s.chunk.write[row]);
    hn::Store(hn::Mul(b, dr0), d, s.dvalues + at);
    hn::Store(hn::Mul(b, dr1), d, s.dvalues + at + kLanes);
    FloatVec da = hn::Load(d, s.da + row * kLanes);
    FloatVec db = hn::Load(d, s.db + row * kLanes);
    da = hn::NegMulAdd(hn::Load(d, s.errors + at), dr0, da);
    da = hn::NegMulAdd(hn::Load(d, s.errors + at + kLanes), dr1, da);
    db = hn::MulAdd(hn::Load(d, s.values + at), dr0, db);
    db = hn::MulAdd(hn::Load(d, s.values + at + kLanes), dr1, db);
    hn::Store(da, d, s.da + row * kLanes);
    hn::Store(db, d, s.db + row * kLanes);
  }
};

// One panel of dS ← dS + scale Qᵀ dO + Kᵀ G.
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
    tile.multiply_add(c.q + i, 1, c.key_stride, dout, kPanel, tokens);
    tile.multiply_add(c.k + i, 1, c.key_stride, g, kPanel, tokens);
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

// One key panel of dQ = scale dO Sᵀ + dP K.
struct QueryGradientTiles {
  const BwdScratch& s;
  std::int64_t padded_values, key;  // key: first column of the panel

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const ChunkScratch& c = s.chunk;
    Tile<M> tile;
    tile.zero();
    for (std::int64_t v = 0; v < padded_values; v += kPanel) {
      tile.multiply_add(s.dout + v * kChunk + r * kPanel, kPanel, 1, s.state_t + key * padded_values + v * kPanel,
                        kPanel, kPanel);
    }
    tile.multiply_add(s.dscores + r * kChunk, kChunk, 1, c.k + key, c.key_stride, r + M);
    tile.store(s.dq + r * c.key_stride + key, c.key_stride);
  }
};

// One key panel of dK = U dSᵀ + G Sᵀ + dPᵀ Q + (dL + dLᵀ) K.
struct KeyGradientTiles {
  const BwdScratch& s;
  std::int64_t padded_values, tokens, key;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const ChunkScratch& c = s.chunk;
    Tile<M> tile;
    tile.zero();
    for (std::int64_t v = 0; v < padded_values; v += kPanel) {
      const std::int64_t rows = v * kChunk + r * kPanel;
      const std::int64_t columns = key * padded_values + v * kPanel;
      tile.multiply_add(s.u + rows, kPanel, 1, s.dstate_t + columns, kPanel, kPanel);
      tile.multiply_add(s.g + rows, kPanel, 1, s.state_t + columns, kPanel, kPanel);
    }
    tile.multiply_add(s.dscores + r * kChunk + r, 1, kChunk, c.q + r * c.key_stride + key, c.key_stride, tokens - r);
    tile.multiply_add(s.dscores + (kChunk + r) * kChunk, kChunk, 1, c.k + key, c.key_stride, tokens);
    tile.store(s.dk + r * c.key_stride + key, c.key_stride);
  }
};

// Everything of one chunk that is done panel by panel of value columns.
template <class T>
HWY_INLINE void value_panel(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t first, BwdScratch& s) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t padded_values = round_up(value_dim, kPanel), count = std::min(kPanel, value_dim - first);
  const auto scale = static_cast<float>(p.rule.scale_for(key_dim));
  float* dstate = s.dstate + first * key_dim;
  float* dout = s.dout + first * kChunk;
  float* u = s.u + first * kChunk;
  float* g = s.g + first * kChunk;

  load_state_panel(p.chunk_states, first, key_dim, value_dim, s.state, at.i_b, at.start / kChunk, at.i_h);
  for (std::int64_t i = 0; i < key_dim; i += kPanel) {
    const std::int64_t rows = std::min(kPanel, key_dim - i), column = i * padded_values + first * kPanel;
    transpose(s.state + i * kPanel, kPanel, rows, kPanel, s.state_t + column, kPanel);
    transpose(dstate + i * kPanel, kPanel, rows, kPanel, s.dstate_t + column, kPanel);
  }
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    load_row(p.v.at(at.i_b, at.start + r, at.i_h, first), p.v.stride[3], count, kPanel, s.values + r * kPanel);
    load_row(p.dout.at(at.i_b, at.start + r, at.i_h, first), p.dout.stride[3], count, kPanel, dout + r * kPanel);
    for (std::int64_t j = 0; j < kPanel; ++j) dout[r * kPanel + j] *= scale;
  }
  SubstitutionTiles<true> substitution{s.chunk, key_dim, s.state, s.values, u, s.errors};
  for_tiles(at.tokens, substitution);
  ReverseSubstitutionTiles reverse{s, key_dim, at.tokens, dstate, dout, g};
  for_tiles_reversed(at.tokens, reverse);
  StateGradientTiles next{s.chunk, at.tokens, dout, g, dstate};
  for_tiles(key_dim, next);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    store_row(s.dvalues + r * kPanel, 1.0F, count, p.dv.at(at.i_b, at.start + r, at.i_h, first), p.dv.stride[3]);
  }
  for (std::int64_t column = 0; column < at.tokens; column += kPanel) {
    transpose(u + column * kPanel, kPanel, std::min(kPanel, at.tokens - column), kPanel,
              s.u_t + column * padded_values + first * kPanel, kPanel);
  }
}

// dP and dL + dLᵀ, with zeros where the triangles end.
HWY_INLINE void score_gradients(std::int64_t tokens, std::int64_t padded_values, BwdScratch& s) {
  float* dp = s.dscores;
  float* dl = s.dscores + kChunk * kChunk;
  ScoreGradientTiles p{s, padded_values, s.dout, dp};
  for_tiles(tokens, p);
  ScoreGradientTiles l{s, padded_values, s.g, dl};
  for_tiles(tokens, l);
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t j = r + 1; j < tokens; ++j) {
      dp[r * kChunk + j] = 0.0F;
      dl[r * kChunk + j] = dl[j * kChunk + r];
    }
    dl[r * kChunk + r] = 0.0F;
  }
}

template <class T>
HWY_INLINE void finish_chunk(const DeltaBackward<T>& p, const ChunkPlace& at, BwdScratch& s) {
  const FloatTag d;
  const std::int64_t stride = s.chunk.key_stride;
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    const float da = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, s.da + r * kLanes)));
    const float db = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, s.db + r * kLanes)));
    finish_token(p, at, r, da, db, s.chunk, s.dq + r * stride, s.dk + r * stride);
  }
}

template <class T>
void ChunkBwdHead(const DeltaBackward<T>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory) {
  Arena arena(memory);
  BwdScratch s;
  s.lay_out(arena, p.shape);
  std::fill_n(memory, arena.bytes(), std::byte{0});  // padding beyond K and V must hold finite numbers
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t padded_values = round_up(value_dim, kPanel);
  for (std::int64_t v = 0; v < value_dim; v += kPanel) {
    load_state_panel(p.dfinal_state, v, key_dim, value_dim, s.dstate + v * key_dim, i_b, i_h);
  }
  for (std::int64_t start = (p.shape.chunks() - 1) * kChunk; start >= 0; start -= kChunk) {
    const ChunkPlace at{i_b, i_h, start, std::min(kChunk, p.shape.tokens - start)};
    load_chunk(p, at, s.chunk);
    compute_scores(at, key_dim, s.chunk);
    std::fill_n(s.da, kChunk * kLanes, 0.0F);
    std::fill_n(s.db, kChunk * kLanes, 0.0F);
    for (std::int64_t v = 0; v < value_dim; v += kPanel) value_panel(p, at, v, s);
    score_gradients(at.tokens, padded_values, s);
    for (std::int64_t key = 0; key < key_dim; key += kPanel) {
      QueryGradientTiles query{s, padded_values, key};
      for_tiles(at.tokens, query);
      KeyGradientTiles keys{s, padded_values, at.tokens, key};
      for_tiles(at.tokens, keys);
    }
    finish_chunk(p, at, s);
  }
  for (std::int64_t v = 0; v < value_dim; v += kPanel) {
    store_state_panel(s.dstate + v * key_dim, p.dinitial_state, v, key_dim, value_dim, i_b, i_h);
  }
}

void ChunkBwdHeadFloat(const DeltaBackward<float>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory) {
  ChunkBwdHead(p, i_b, i_h, memory);
}

void ChunkBwdHeadBfloat16(const DeltaBackward<bfloat16>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory) {
  ChunkBwdHead(p, i_b, i_h, memory);
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

void head(const DeltaBackward<float>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(ChunkBwdHeadFloat)(p, i_b, i_h, memory);
}
void head(const DeltaBackward<bfloat16>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(ChunkBwdHeadBfloat16)(p, i_b, i_h, memory);
}

}  // namespace

std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, int threads) {
  return HWY_DYNAMIC_DISPATCH(BwdBytesPerWorker)(shape) * static_cast<std::size_t>(threads);
}

template <class T>
void chunk_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(pool.threads());
  pool.run(p.shape.batch * p.shape.heads, [&](std::int64_t task, int worker) {
    head(p, task / p.shape.heads, task % p.shape.heads, workspace.data + bytes * static_cast<std::size_t>(worker));
  });
}

template void chunk_bwd(const DeltaBackward<float>&, Workspace, ThreadPool&);
template void chunk_bwd(const DeltaBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
