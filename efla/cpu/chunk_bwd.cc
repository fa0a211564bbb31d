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
  std::int64_t key_dim = 0;
  ChunkScratch chunk;
  float* state = nullptr;     // panels [K, kPanel] of S before the chunk
  float* dstate = nullptr;    // panels [K, kPanel] of dS
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

  void lay_out(Arena& arena, const DeltaShape& shape, int team) {
    chunk.lay_out(arena, shape);
    key_dim = shape.key_dim;
    const std::int64_t padded_keys = round_up(key_dim, kPanel), padded_values = round_up(shape.value_dim, kPanel);
    errors = arena.floats(team * kChunk * kPanel);
    for (float** s : {&state, &dstate}) *s = arena.floats(key_dim * padded_values);
    for (float** t : {&state_t, &dstate_t}) *t = arena.floats(padded_keys * padded_values);
    for (float** panels : {&values, &u, &dout, &g}) *panels = arena.floats(kChunk * padded_values);
    u_t = arena.floats(round_up(kChunk, kPanel) * padded_values);
    for (float** sums : {&da, &db}) *sums = arena.floats(padded_values / kPanel * kChunk * kLanes);
    dscores = arena.floats(2 * kChunk * kChunk);
    for (float** rows : {&dq, &dk}) *rows = arena.floats(kChunk * padded_keys);
  }
};

std::size_t BwdBytesPerWorker(const DeltaShape& shape) {
  Arena arena;
  BwdScratch().lay_out(arena, shape, 1);
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
    const FloatVec da = hn::Neg(hn::Mul(hn::Load(d, errors + at), dr0));
    const FloatVec db = hn::Mul(hn::Load(d, values + at), dr0);
    hn::Store(hn::NegMulAdd(hn::Load(d, errors + at + kLanes), dr1, da), d, da_sums + row * kLanes);
    hn::Store(hn::MulAdd(hn::Load(d, values + at + kLanes), dr1, db), d, db_sums + row * kLanes);
    const FloatVec b = hn::Set(d, c.write[row]);
    hn::Store(hn::Mul(b, dr0), d, values + at);
    hn::Store(hn::Mul(b, dr1), d, values + at + kLanes);
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

// Share `share` of `shares` of what the chunk at `start` reads.
template <class T>
HWY_INLINE void prefetch_chunk(const DeltaBackward<T>& p, std::int64_t i_b, std::int64_t start, std::int64_t i_h,
                               std::int64_t share, std::int64_t shares) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  for (std::int64_t t = start + kChunk * share / shares; t < start + kChunk * (share + 1) / shares; ++t) {
    prefetch_row(p.q.at(i_b, t, i_h), p.q.stride[3], key_dim);
    prefetch_row(p.k.at(i_b, t, i_h), p.k.stride[3], key_dim);
    prefetch_row(p.v.at(i_b, t, i_h), p.v.stride[3], value_dim);
    prefetch_row(p.dout.at(i_b, t, i_h), p.dout.stride[3], value_dim);
  }
  for (std::int64_t i = key_dim * share / shares; i < key_dim * (share + 1) / shares; ++i) {
    prefetch_row(p.chunk_states.at(i_b, start / kChunk, i_h, i), p.chunk_states.stride[4], value_dim);
  }
}

// Everything of one chunk that is done panel by panel of value columns.
template <class T>
HWY_INLINE void value_panel(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t first, BwdScratch& s,
                            float* errors) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t padded_values = round_up(value_dim, kPanel);
  const float* state = s.state + first * key_dim;
  float* dstate = s.dstate + first * key_dim;
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
  StateGradientTiles next{s.chunk, at.tokens, dout, g, dstate};
  for_tiles(key_dim, next);
  for (std::int64_t column = 0; column < at.tokens; column += kPanel) {
    transpose(u + column * kPanel, kPanel, std::min(kPanel, at.tokens - column), kPanel,
              s.u_t + column * padded_values + first * kPanel, kPanel);
  }
}

// dP (half 0) or dL + dLᵀ (half 1), with zeros where the triangle ends.
HWY_INLINE void score_gradient(std::int64_t half, std::int64_t tokens, std::int64_t padded_values, BwdScratch& s) {
  float* out = s.dscores + half * kChunk * kChunk;
  ScoreGradientTiles tiles{s, padded_values, half == 0 ? s.dout : s.g, out};
  for_tiles(tokens, tiles);
  for (std::int64_t r = 0; r < tokens; ++r) {
    for (std::int64_t j = r + 1; j < tokens; ++j) out[r * kChunk + j] = half == 0 ? 0.0F : out[j * kChunk + r];
    if (half == 1) out[r * kChunk + r] = 0.0F;
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
    finish_token(p, at, r, hn::GetLane(hn::SumOfLanes(d, da)), hn::GetLane(hn::SumOfLanes(d, db)), s.chunk,
                 s.dq + r * stride, s.dk + r * stride);
  }
}

// One head, its panels shared out to the `team` threads of the pool; on the calling thread alone inside a task.
template <class T>
void ChunkBwdHead(const DeltaBackward<T>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory, int team,
                  ThreadPool& pool) {
  Arena arena(memory);
  BwdScratch s;
  s.lay_out(arena, p.shape, team);
  std::fill_n(memory, arena.bytes(), std::byte{0});  // padding beyond K and V must hold finite numbers
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  const std::int64_t padded_values = round_up(value_dim, kPanel);
  const auto scale = static_cast<float>(p.rule.scale_for(key_dim));
  load_state_panels(p.dfinal_state, 0, value_dim, key_dim, s.dstate, i_b, i_h);
  for (std::int64_t start = (p.shape.chunks() - 1) * kChunk; start >= 0; start -= kChunk) {
    const ChunkPlace at{i_b, i_h, start, std::min(kChunk, p.shape.tokens - start)};
    load_chunk(p, at, s.chunk);
    compute_scores(at, key_dim, s.chunk);
    load_state_panels(p.chunk_states, 0, value_dim, key_dim, s.state, i_b, start / kChunk, i_h);
    load_values(p.v, at, 0, value_dim, 1.0F, s.values);
    load_values(p.dout, at, 0, value_dim, scale, s.dout);
    const std::int64_t panels = padded_values / kPanel;
    pool.run(panels, [&](std::int64_t panel, int member) HWY_ATTR {
      if (start > 0) prefetch_chunk(p, i_b, start - kChunk, i_h, panel, panels);
      value_panel(p, at, panel * kPanel, s, s.errors + member * kChunk * kPanel);
    });
    store_values(s.values, at, 0, value_dim, 1.0F, p.dv);
    pool.run(2, [&](std::int64_t half, int) HWY_ATTR { score_gradient(half, at.tokens, padded_values, s); });
    pool.run(round_up(key_dim, kPanel) / kPanel, [&](std::int64_t panel, int) HWY_ATTR {
      QueryGradientTiles query{s, padded_values, panel * kPanel};
      for_tiles(at.tokens, query);
      KeyGradientTiles keys{s, padded_values, at.tokens, panel * kPanel};
      for_tiles(at.tokens, keys);
    });
    finish_chunk(p, at, s);
  }
  store_state_panels(s.dstate, p.dinitial_state, 0, value_dim, key_dim, i_b, i_h);
}

void ChunkBwdHeadFloat(const DeltaBackward<float>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory, int team,
                       ThreadPool& pool) {
  ChunkBwdHead(p, i_b, i_h, memory, team, pool);
}

void ChunkBwdHeadBfloat16(const DeltaBackward<bfloat16>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory,
                          int team, ThreadPool& pool) {
  ChunkBwdHead(p, i_b, i_h, memory, team, pool);
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

void head(const DeltaBackward<float>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory, int team,
          ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(ChunkBwdHeadFloat)(p, i_b, i_h, memory, team, pool);
}
void head(const DeltaBackward<bfloat16>& p, std::int64_t i_b, std::int64_t i_h, std::byte* memory, int team,
          ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(ChunkBwdHeadBfloat16)(p, i_b, i_h, memory, team, pool);
}

}  // namespace

std::size_t chunk_bwd_workspace_bytes(const DeltaShape& shape, int threads) {
  return HWY_DYNAMIC_DISPATCH(BwdBytesPerWorker)(shape) * static_cast<std::size_t>(threads);
}

template <class T>
void chunk_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t heads = p.shape.batch * p.shape.heads;
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
