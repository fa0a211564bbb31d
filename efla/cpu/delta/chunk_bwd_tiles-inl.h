// The scratch of the backward of the chunk algorithm and its matrix products in tiles (chunk_bwd.cc has the equations).
// Included once per target.
#if defined(EFLA_CPU_CHUNK_BWD_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_CHUNK_BWD_TILES_INL_H_
#undef EFLA_CPU_CHUNK_BWD_TILES_INL_H_
#else
#define EFLA_CPU_CHUNK_BWD_TILES_INL_H_
#endif

#include "efla/cpu/common/prefetch_list.h"
#include "efla/cpu/delta/chunk_bwd_decay-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {

// Scratch for one chunk of one value head. Arrays over value columns are lists of panels. Vp and Kp are V and K rounded
// up to whole panels.
struct BwdScratch {
  std::int64_t key_dim = 0;
  ChunkScratch chunk;
  float* state = nullptr;     // panels [K, kPanel] of S before the chunk
  float* state_t = nullptr;   // Sᵀ: key panels of [Vp, kPanel]
  float* dstate_t = nullptr;  // dSᵀ after the chunk: key panels of [Vp, kPanel]
  float* errors = nullptr;    // per thread that works on the head [kChunk, kPanel]: E
  float* values = nullptr;    // panels [kChunk, kPanel]: V, then dV
  float* u = nullptr;         // panels [kChunk, kPanel]
  float* u_t = nullptr;       // Uᵀ: token panels of [Vp, kPanel]
  float* dout = nullptr;      // panels [kChunk, kPanel]: scale · dO
  float* g = nullptr;         // panels [kChunk, kPanel]: G
  float* da = nullptr;        // per panel [kChunk, kLanes]: partial sums
  float* db = nullptr;        // per panel [kChunk, kLanes]
  float* dscores = nullptr;   // [2 kChunk, kChunk]: dP, zero above the diagonal, then dL + dLᵀ or dL (score_gradient)
  float* dq = nullptr;        // [kChunk, Kp], the caller's
  float* dk = nullptr;        // [kChunk, Kp], the caller's; with two keys dκ [kChunk, Kp] follows
  float* addresses = nullptr;  // memory of a prefetch list per thread that works on the head
  DecayGradient decay;         // allocated only if the rule has a decay

  // Returns an upper bound on the number of addresses of the rows that a chunk reads and writes.
  static std::int64_t prefetch_addresses(const DeltaShape& shape) {
    constexpr std::int64_t kKeyRows = kTwoKeys ? 8 : 6;
    return PrefetchList::of_rows(kChunk, shape.key_dim) * kKeyRows +
           PrefetchList::of_rows(kChunk, shape.value_dim) * 3 + PrefetchList::of_rows(shape.key_dim, shape.value_dim);
  }

  void lay_out(Arena& arena, const DeltaShape& shape, Decay kind, int group_threads) {
    chunk.lay_out(arena, shape, kind);
    key_dim = shape.key_dim;
    const std::int64_t padded_keys = round_up(key_dim, kPanel), padded_values = round_up(shape.value_dim, kPanel);
    errors = arena.floats(group_threads * kChunk * kPanel);
    state = arena.floats(key_dim * padded_values);
    for (float** t : {&state_t, &dstate_t}) *t = arena.floats(padded_keys * padded_values);
    for (float** panels : {&values, &u, &dout, &g}) *panels = arena.floats(kChunk * padded_values);
    u_t = arena.floats(round_up(kChunk, kPanel) * padded_values);
    for (float** sums : {&da, &db}) *sums = arena.floats(padded_values / kPanel * kChunk * kLanes);
    dscores = arena.floats(2 * kChunk * kChunk);
    addresses = PrefetchList::lay_out(arena, group_threads * prefetch_addresses(shape));
    if (kind != Decay::none) decay.lay_out(arena, padded_keys, key_dim * padded_values / kPanel);
  }
};

// Computes one panel of dR by backward substitution, and from it dV, G and the panel's contribution to da and db. With
// kGivenUpdates dU is given, and dS and dO are not read.
template <bool kGivenUpdates>
struct ReverseSubstitutionTiles {
  const ChunkScratch& c;
  std::int64_t key_dim, tokens;
  const float* dstate;                 // [K, kPanel] after the chunk
  const float* errors;                 // [kChunk, kPanel]
  float* values;                       // [kChunk, kPanel]: v, overwritten by dV
  const float* dout;                   // [kChunk, kPanel]
  float* g;                            // [kChunk, kPanel]
  float* da_sums;                      // [kChunk, kLanes]
  float* db_sums;                      // [kChunk, kLanes]
  const float* du;                     // [kChunk, kPanel], with kGivenUpdates
  PrefetchList* prefetches = nullptr;  // without kGivenUpdates

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const FloatTag d;
    [[maybe_unused]] const float* p = c.p_scores() + r;
    const float* l = c.l_scores() + r;
    const std::int64_t below = r + M;  // rows from this one on are done
    Tile<M> tile;
    if constexpr (kGivenUpdates) {
      tile.load(du + r * kPanel);
    } else {
      tile.zero();
      tile.multiply_add(c.k_write + r * c.key_stride, c.key_stride, 1, dstate, kPanel, key_dim, *prefetches);
      tile.multiply_add(p + below * kChunk, 1, kChunk, dout + below * kPanel, kPanel, tokens - below);
    }
    tile.multiply_add(l + below * kChunk, 1, kChunk, g + below * kPanel, kPanel, tokens - below);
    unroll<M>([&](auto from_end) EFLA_UNROLLED {
      constexpr int m = M - 1 - from_end;
      const std::int64_t at = (r + m) * kPanel;
      if constexpr (!kGivenUpdates) add_output<m>(tile, r, p);
      const FloatVec dr0 = tile.acc[m][0];
      const FloatVec dr1 = tile.acc[m][1];
      finish_row(r + m, dr0, dr1);
      const FloatVec a = hn::Set(d, -c.erase[r + m]);
      const FloatVec g0 = hn::Mul(a, dr0);
      const FloatVec g1 = hn::Mul(a, dr1);
      hn::Store(g0, d, g + at);
      hn::Store(g1, d, g + at + kLanes);
      unroll<m>([&](auto above) EFLA_UNROLLED { tile.add(above, l[(r + m) * kChunk + above], g0, g1); });
    });
  }

  // Adds row r + kRow of dO times its column of P to rows 0 … kRow of the tile.
  template <int kRow, int M>
  HWY_INLINE void add_output(Tile<M>& tile, std::int64_t r, const float* p) {
    const FloatTag d;
    const std::int64_t at = (r + kRow) * kPanel;
    const FloatVec o0 = hn::Load(d, dout + at), o1 = hn::Load(d, dout + at + kLanes);
    unroll<kRow + 1>([&](auto above) EFLA_UNROLLED { tile.add(above, p[(r + kRow) * kChunk + above], o0, o1); });
  }

  // Computes dV and adds the row's contribution to da and db.
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

// Computes one panel of dS ← D dS + scale Q_readᵀ dO + K_readᵀ G, with D the decays of the whole chunk.
struct StateGradientTiles {
  const ChunkScratch& c;
  std::int64_t tokens;
  const float* dout;  // [kChunk, kPanel]
  const float* g;     // [kChunk, kPanel]
  float* dstate;      // [K, kPanel]
  PrefetchList& prefetches;

  template <int M>
  HWY_INLINE void run(std::int64_t i) {
    Tile<M> tile;
    tile.load(dstate + i * kPanel);
    if (c.decay.whole != nullptr) tile.scale_rows(c.decay.whole + i);
    tile.multiply_add(c.q_read + i, 1, c.key_stride, dout, kPanel, tokens, prefetches);
    tile.multiply_add(c.k_read + i, 1, c.key_stride, g, kPanel, tokens, prefetches);
    tile.store(dstate + i * kPanel);
  }
};

// Computes rows of `left` · Uᵀ, in all columns that the lower triangle needs. left is dO or G as panels.
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

// Computes one key panel of dQ = scale dO Sᵀ + dP K. With a decay the first term is multiplied by the decays `prefix`,
// and decay.reads gets its product with q. With a channel gate channel_pairs adds the second term.
struct QueryGradientTiles {
  const BwdScratch& s;
  std::int64_t padded_values, key;  // key: first column of the panel
  PrefetchList& prefetches;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const ChunkScratch& c = s.chunk;
    const std::int64_t at = r * c.key_stride + key;
    Tile<M> tile;
    tile.zero();
    for (std::int64_t v = 0; v < padded_values; v += kPanel) {
      tile.multiply_add(s.dout + v * kChunk + r * kPanel, kPanel, 1, s.state_t + key * padded_values + v * kPanel,
                        kPanel, kPanel, prefetches);
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

// Computes one key panel of dK = U dSᵀ + G Sᵀ + dPᵀ Q + (dL + dLᵀ) K, with decays as in QueryGradientTiles: `suffix` in
// the first term, `prefix` in the second.
struct KeyGradientTiles {
  const BwdScratch& s;
  std::int64_t padded_values, tokens, key;
  PrefetchList& prefetches;

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
        tile.multiply_add(s.u + rows, kPanel, 1, s.dstate_t + columns, kPanel, kPanel, prefetches);
        tile.multiply_add(s.g + rows, kPanel, 1, s.state_t + columns, kPanel, kPanel, prefetches);
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

  // Adds rows r … of `left` times `right`, the transposed panels of a state or its gradient, to the tile.
  template <int M>
  HWY_INLINE void state_product(const float* left, const float* right, std::int64_t r, Tile<M>& tile) {
    for (std::int64_t v = 0; v < padded_values; v += kPanel) {
      tile.multiply_add(left + v * kChunk + r * kPanel, kPanel, 1, right + key * padded_values + v * kPanel, kPanel,
                        kPanel, prefetches);
    }
  }
};

// Computes one key panel of dK = U dSᵀ + dPᵀ Q + dLᵀ E and of the gradient of the erase keys, dE = G Sᵀ + dL K, of a
// rule with two keys, with decays as in KeyGradientTiles. E has the rows κ.
struct TwoKeyGradientTiles {
  const BwdScratch& s;
  std::int64_t padded_values, tokens, key;
  PrefetchList& prefetches;

  template <int M>
  HWY_INLINE void run(std::int64_t r) {
    const ChunkScratch& c = s.chunk;
    const std::int64_t at = r * c.key_stride + key;
    const float* dl = s.dscores + kChunk * kChunk;
    const float* erase_keys = c.erase_keys();
    KeyGradientTiles products{s, padded_values, tokens, key, prefetches};
    Tile<M> tile;
    tile.zero();
    products.state_product(s.g, s.state_t, r, tile);
    if (c.decay.kind != Decay::none) {
      tile.multiply(c.decay.prefix + at, c.key_stride);
      tile.template store_product<true>(erase_keys + at, s.decay.reads + at, c.key_stride);
    }
    if (c.decay.kind != Decay::channel) {
      tile.multiply_add(dl + r * kChunk, kChunk, 1, c.k + key, c.key_stride, r + M);
    }
    tile.store(s.dk + kChunk * c.key_stride + at, c.key_stride);
    tile.zero();
    products.state_product(s.u, s.dstate_t, r, tile);
    if (c.decay.kind != Decay::none) {
      tile.multiply(c.decay.suffix + at, c.key_stride);
      tile.template store_product<false>(c.k + at, s.decay.writes + at, c.key_stride);
    }
    if (c.decay.kind != Decay::channel) {
      const std::int64_t row = r * c.key_stride + key;
      tile.multiply_add(s.dscores + r * kChunk + r, 1, kChunk, c.q + row, c.key_stride, tokens - r);
      tile.multiply_add(dl + r * kChunk + r, 1, kChunk, erase_keys + row, c.key_stride, tokens - r);
    }
    tile.store(s.dk + at, c.key_stride);
  }
};

}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
