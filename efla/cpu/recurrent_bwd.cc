// The gradients of the token recurrence (EFLA paper, equation 20). Value columns do not meet in it, so a panel of them
// is taken through a chunk at a time: forward from the state saved before the chunk, keeping S̃_t = D_t S_{t−1} and u_t
// = b v − a e, e = S̃ᵀ k, of every token; then back, with dS the gradient with respect to S_t and dO scaled:
//
//   dS += q dOᵀ,   dk = dS u,   du = dSᵀ k,   dv = b du,   db = vᵀ du,   da = −eᵀ du,   de = −a du
//   dS += k deᵀ,   dq = S̃ dO + k (uᵀ dO),   dk += S̃ de,   dg = rowsum(dS ∘ S̃),   dS ← D dS
//
// The first line reads dS whole before the second changes it, so a sweep over the rows of dS ends one token (its second
// line) and begins the token before it (the first).
#include "efla/cpu/delta.h"

#include <numeric>

#include "efla/cpu/team.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/recurrent_bwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Rows of a state whose sums over columns are reduced together.
constexpr int kBlock = HWY_TARGET == HWY_SCALAR ? 1 : 4;

// A panel [rows, kPanel] of a state has K rounded up to whole blocks, the rows beyond K zero.
std::int64_t state_rows(const DeltaShape& shape) { return round_up(shape.key_dim, kBlock); }

// What panels add to the gradients of a chunk, one array after the other.
struct PanelSums {
  float *da, *db;  // [kChunk, kLanes] partial sums of a value head
  float *dq, *dk;  // [kChunk, Kp] of the query head
  float* dg;       // [kChunk, Kp] of a value head, with a decay; a scalar one's is summed over channels at the end
  float* end;

  static std::int64_t floats(std::int64_t key_stride, Decay decay) {
    return kChunk * (2 * kLanes + (decay == Decay::none ? 2 : 3) * key_stride);
  }

  PanelSums(float* memory, std::int64_t key_stride, Decay decay)
      : da(memory),
        db(da + kChunk * kLanes),
        dq(db + kChunk * kLanes),
        dk(dq + kChunk * key_stride),
        dg(dk + kChunk * key_stride),
        end(memory + floats(key_stride, decay)) {}
};

// What a thread computes a panel in.
struct PanelScratch {
  float *values, *dout, *u, *errors;  // [kChunk, kPanel]: V and then dV, scale · dO, u and e
  float* states;                      // [kChunk, rows, kPanel] S̃ of every token

  static std::int64_t floats(std::int64_t rows) { return kChunk * kPanel * (4 + rows); }

  explicit PanelScratch(float* memory)
      : values(memory),
        dout(values + kChunk * kPanel),
        u(dout + kChunk * kPanel),
        errors(u + kChunk * kPanel),
        states(errors + kChunk * kPanel) {}
};

// One query head, for one thread or for a team. A team computes the panels of all value heads at once, each with sums
// of its own; one thread adds a panel's sums before it takes the next panel.
struct BwdScratch {
  int team;
  std::int64_t rows, key_stride, panels, heads;  // of a state, of a row, of a value head, computed at a time
  std::int64_t chunk_floats;
  float* dstate;   // for each value head panels [rows, kPanel]
  float* sums;     // PanelSums
  float* parts;    // PanelSums of every panel that is computed at a time
  float* members;  // PanelScratch of every thread
  float* chunks;   // ChunkScratch of every value head that is computed at a time

  BwdScratch(Arena& arena, const DeltaShape& shape, Decay decay, int team)
      : team(team),
        rows(state_rows(shape)),
        key_stride(round_up(shape.key_dim, kPanel)),
        panels(round_up(shape.value_dim, kPanel) / kPanel),
        heads(team > 1 ? shape.group() : 1) {
    Arena one;
    ChunkScratch().lay_out(one, shape, decay);
    chunk_floats = static_cast<std::int64_t>(one.bytes() / sizeof(float));
    dstate = arena.floats(shape.group() * panels * rows * kPanel);
    sums = arena.floats(PanelSums::floats(key_stride, decay));
    parts = arena.floats(PanelSums::floats(key_stride, decay) * (team > 1 ? heads * panels : 1));
    members = arena.floats(PanelScratch::floats(rows) * team);
    chunks = arena.floats(chunk_floats * heads);
  }

  ChunkScratch chunk(const DeltaShape& shape, Decay decay, std::int64_t head) const {
    Arena arena(reinterpret_cast<std::byte*>(chunks + head * chunk_floats));
    ChunkScratch scratch;
    scratch.lay_out(arena, shape, decay);
    return scratch;
  }
};

std::size_t RecurrentBwdBytes(const DeltaShape& shape, Decay decay, int team) {
  Arena arena;
  const BwdScratch scratch(arena, shape, decay, team);
  return arena.bytes();
}

// The panel at column `first` of a [K, V] state, zeros beyond K and V or if there is no state.
template <int Rank, class Float, class... Index>
HWY_INLINE void load_panel(const View<Float, Rank>& view, const DeltaShape& shape, std::int64_t first, float* panel,
                           Index... index) {
  const std::int64_t loaded = view ? shape.key_dim : 0;
  for (std::int64_t i = 0; i < loaded; ++i) {
    load_row(view.at(index..., i, first), view.stride[Rank - 1], std::min(kPanel, shape.value_dim - first), kPanel,
             panel + i * kPanel);
  }
  std::fill_n(panel + loaded * kPanel, (state_rows(shape) - loaded) * kPanel, 0.0F);
}

template <int Rank, class... Index>
HWY_INLINE void store_panel(const float* panel, const View<float, Rank>& view, const DeltaShape& shape,
                            std::int64_t first, Index... index) {
  if (!view) return;
  for (std::int64_t i = 0; i < shape.key_dim; ++i) {
    store_row(panel + i * kPanel, 1.0F, std::min(kPanel, shape.value_dim - first), view.at(index..., i, first),
              view.stride[Rank - 1]);
  }
}

HWY_INLINE float sum_of(FloatVec x) { return hn::GetLane(hn::SumOfLanes(FloatTag(), x)); }

using BlockTag = hn::FixedTag<float, kBlock>;
using BlockVec = hn::Vec<BlockTag>;

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE BlockVec sums_of_lanes(const FloatVec (&x)[kBlock]) { return x[0]; }
#else
// The sum of the blocks of 128 bits.
template <class D>
HWY_INLINE BlockVec add_blocks(D d, hn::Vec<D> x) {
  if constexpr (hn::MaxLanes(d) == std::size_t{kBlock}) {
    return x;
  } else {
    const hn::Half<D> half;
    return add_blocks(half, hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x)));
  }
}

// Element m is the sum of x[m].
HWY_INLINE BlockVec sums_of_lanes(const FloatVec (&x)[kBlock]) {
  const FloatTag d;
  const hn::Repartition<double, FloatTag> dd;
  const auto pair = [&](FloatVec a, FloatVec b) HWY_ATTR {
    return hn::BitCast(dd, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  };
  const auto a = pair(x[0], x[1]), b = pair(x[2], x[3]);
  return add_blocks(
      d, hn::Add(hn::BitCast(d, hn::InterleaveLower(dd, a, b)), hn::BitCast(d, hn::InterleaveUpper(dd, a, b))));
}
#endif

// One row of a panel.
struct PanelRow {
  FloatVec v0, v1;

  static HWY_INLINE PanelRow load(const float* from) {
    return {hn::Load(FloatTag(), from), hn::Load(FloatTag(), from + kLanes)};
  }
  HWY_INLINE void store(float* to) const {
    hn::Store(v0, FloatTag(), to);
    hn::Store(v1, FloatTag(), to + kLanes);
  }
  HWY_INLINE void add(float factor, const PanelRow& x) {
    const FloatVec f = hn::Set(FloatTag(), factor);
    v0 = hn::MulAdd(f, x.v0, v0);
    v1 = hn::MulAdd(f, x.v1, v1);
  }
  HWY_INLINE void multiply(float factor) {
    const FloatVec f = hn::Set(FloatTag(), factor);
    v0 = hn::Mul(f, v0);
    v1 = hn::Mul(f, v1);
  }
  // Sums whose lanes add up to the inner product with x.
  HWY_INLINE FloatVec dot(const PanelRow& x) const { return hn::MulAdd(v1, x.v1, hn::Mul(v0, x.v0)); }
};

// The row [Kp] of token r.
HWY_INLINE const float* row_of(const float* rows, const ChunkScratch& c, std::int64_t r) {
  return rows + r * c.key_stride;
}

// S̃_r from the state after the token before, S̃_{r−1} + k uᵀ (for the first token the chunk's own, in states[0]), and
// with it e and u.
template <bool kFirst, bool kDecay>
HWY_INLINE void play(const ChunkScratch& c, std::int64_t r, std::int64_t rows, const PanelScratch& s) {
  const FloatTag d;
  float* state = s.states + r * rows * kPanel;
  const float* before = kFirst ? state : state - rows * kPanel;
  const float* k = c.k + r * c.key_stride;
  const float* k_before = kFirst ? k : k - c.key_stride;
  const float* decay = kDecay ? c.decay.token + r * c.key_stride : nullptr;
  const PanelRow zero{hn::Zero(d), hn::Zero(d)};
  const PanelRow written = kFirst ? zero : PanelRow::load(s.u + (r - 1) * kPanel);
  PanelRow even = zero, odd = zero;
  for (std::int64_t first = 0; first < rows; first += kBlock) {
    unroll<kBlock>([&](auto m) EFLA_UNROLLED {
      const std::int64_t i = first + m;
      PanelRow x = PanelRow::load(before + i * kPanel);
      if constexpr (!kFirst) x.add(k_before[i], written);
      if constexpr (kDecay) x.multiply(decay[i]);
      x.store(state + i * kPanel);
      PanelRow& error = m % 2 == 0 ? even : odd;
      error.add(k[i], x);
    });
  }
  even.v0 = hn::Add(even.v0, odd.v0);
  even.v1 = hn::Add(even.v1, odd.v1);
  even.store(s.errors + r * kPanel);
  PanelRow u = PanelRow::load(s.values + r * kPanel);
  u.multiply(c.write[r]);
  u.add(-c.erase[r], even);
  u.store(s.u + r * kPanel);
}

// One sweep over a panel of dS: ends token `r` (kEnd) with the gradient de of its error, and begins token r − 1
// (kBegin), whose du is returned.
template <bool kEnd, bool kBegin, bool kDecay>
HWY_INLINE PanelRow sweep(const ChunkScratch& c, std::int64_t r, std::int64_t rows, const PanelScratch& s, PanelRow de,
                          float* dstate, const PanelSums& sums) {
  const FloatTag d;
  const BlockTag block;
  const std::int64_t n = c.key_stride, ending = kEnd ? r : r - 1, beginning = kBegin ? r - 1 : r;
  const float *k = c.k + ending * n, *q_next = c.q + beginning * n, *k_next = c.k + beginning * n;
  const float* decay = kDecay ? c.decay.token + ending * n : nullptr;
  const float* state = s.states + ending * rows * kPanel;
  float *dq = sums.dq + ending * n, *dk = sums.dk + ending * n, *dk_next = sums.dk + beginning * n;
  const PanelRow dout = PanelRow::load(s.dout + ending * kPanel),
                 dout_next = PanelRow::load(s.dout + beginning * kPanel);
  const PanelRow u_next = PanelRow::load(s.u + beginning * kPanel);
  const float own = sum_of(PanelRow::load(s.u + ending * kPanel).dot(dout));  // uᵀ dO
  PanelRow du{hn::Zero(d), hn::Zero(d)};
  for (std::int64_t i = 0; i < rows; i += kBlock) {
    FloatVec dq_sums[kBlock], dk_sums[kBlock], dg_sums[kBlock], dk_next_sums[kBlock];
    unroll<kBlock>([&](auto m) EFLA_UNROLLED {
      float* at = dstate + (i + m) * kPanel;
      PanelRow ds = PanelRow::load(at);
      if constexpr (kEnd) {
        const PanelRow x = PanelRow::load(state + (i + m) * kPanel);
        ds.add(k[i + m], de);
        dq_sums[m] = x.dot(dout);
        dk_sums[m] = x.dot(de);
        if constexpr (kDecay) {
          dg_sums[m] = x.dot(ds);
          ds.multiply(decay[i + m]);
        }
      }
      if constexpr (kBegin) {
        ds.add(q_next[i + m], dout_next);
        dk_next_sums[m] = ds.dot(u_next);
        du.add(k_next[i + m], ds);
      }
      ds.store(at);
    });
    if constexpr (kEnd) {
      const BlockVec read = hn::MulAdd(hn::LoadU(block, k + i), hn::Set(block, own), sums_of_lanes(dq_sums));
      hn::StoreU(read, block, dq + i);
      hn::StoreU(hn::Add(hn::LoadU(block, dk + i), sums_of_lanes(dk_sums)), block, dk + i);
      if constexpr (kDecay) hn::StoreU(sums_of_lanes(dg_sums), block, sums.dg + ending * n + i);
    }
    if constexpr (kBegin) hn::StoreU(sums_of_lanes(dk_next_sums), block, dk_next + i);
  }
  return du;
}

// From du of token r: dv, the token's part of da and db, and de, which is returned.
HWY_INLINE PanelRow finish_values(const ChunkScratch& c, std::int64_t r, PanelRow du, const PanelScratch& s,
                                  const PanelSums& sums) {
  const FloatTag d;
  float* values = s.values + r * kPanel;
  hn::Store(hn::Neg(PanelRow::load(s.errors + r * kPanel).dot(du)), d, sums.da + r * kLanes);
  hn::Store(PanelRow::load(values).dot(du), d, sums.db + r * kLanes);
  PanelRow dv = du;
  dv.multiply(c.write[r]);
  dv.store(values);
  du.multiply(-c.erase[r]);
  return du;
}

// The tokens of a chunk, forward and back.
template <bool kDecay>
HWY_INLINE void walk(const ChunkScratch& c, std::int64_t tokens, std::int64_t rows, const PanelScratch& s,
                     float* dstate, const PanelSums& sums) {
  play<true, kDecay>(c, 0, rows, s);
  for (std::int64_t r = 1; r < tokens; ++r) play<false, kDecay>(c, r, rows, s);
  const PanelRow none{};
  PanelRow du = sweep<false, true, kDecay>(c, tokens, rows, s, none, dstate, sums);
  for (std::int64_t r = tokens - 1; r > 0; --r) {
    du = sweep<true, true, kDecay>(c, r, rows, s, finish_values(c, r, du, s, sums), dstate, sums);
  }
  sweep<true, false, kDecay>(c, 0, rows, s, finish_values(c, 0, du, s, sums), dstate, sums);
}

// One chunk of the panel at column `first` of a value head.
template <class T>
HWY_INLINE void panel_of_head(const DeltaBackward<T>& p, const ChunkPlace& at, std::int64_t saved, std::int64_t first,
                              const ChunkScratch& c, const PanelScratch& s, float* dstate, const PanelSums& sums) {
  const std::int64_t width = std::min(kPanel, p.shape.value_dim - first), rows = state_rows(p.shape);
  const auto scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  load_panel(p.chunk_states, p.shape, first, s.states, at.i_b, saved, at.i_h);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    const std::int64_t t = at.start + r;
    load_row(p.v.at(at.i_b, t, at.i_h, first), p.v.stride[3], width, kPanel, s.values + r * kPanel);
    load_row(p.dout.at(at.i_b, t, at.i_h, first), p.dout.stride[3], width, kPanel, s.dout + r * kPanel);
    for (std::int64_t j = 0; j < kPanel; ++j) s.dout[r * kPanel + j] *= scale;
  }
  if (p.rule.decay == Decay::none) {
    walk<false>(c, at.tokens, rows, s, dstate, sums);
  } else {
    walk<true>(c, at.tokens, rows, s, dstate, sums);
  }
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    store_row(s.values + r * kPanel, 1.0F, width, p.dv.at(at.i_b, at.start + r, at.i_h, first), p.dv.stride[3]);
  }
}

// The end of a chunk of a value head: from its sums over the panels to dbeta and dg, and by λ = ‖k‖² to dk.
template <class T>
HWY_INLINE void finish_head(const DeltaBackward<T>& p, const ChunkPlace& at, const ChunkScratch& c,
                            const PanelSums& sums) {
  const FloatTag d;
  const std::int64_t n = c.key_stride;
  const GainSlopes slopes = gain_slopes(p.rule.step, at.tokens, c.beta, c.lambda);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    finish_gains(p, at, r, sum_of(hn::Load(d, sums.da + r * kLanes)), sum_of(hn::Load(d, sums.db + r * kLanes)), c,
                 slopes, sums.dk + r * n);
    if (p.rule.decay == Decay::none) continue;
    const float* dg = sums.dg + r * n;
    float* out = p.dg.at(at.i_b, at.start + r, at.i_h);
    if (p.rule.decay == Decay::channel) {
      store_row(dg, 1.0F, p.shape.key_dim, out, p.dg.stride[3]);
    } else {
      *out = std::accumulate(dg, dg + p.shape.key_dim, 0.0F);
    }
  }
}

// The chunk at `start` of value heads first … first + s.heads − 1. What they give to dq and dk is added to the sums,
// panel after panel in their order.
template <class T>
HWY_INLINE void chunk_of_heads(const DeltaBackward<T>& p, const Sequence& sequence, std::int64_t first,
                               std::int64_t start, float* dstate, const BwdScratch& s, ThreadPool& pool) {
  const Decay decay = p.rule.decay;
  const PanelSums sums(s.sums, s.key_stride, decay);
  const std::int64_t floats = PanelSums::floats(s.key_stride, decay);
  const auto place = [&](std::int64_t head) { return ChunkPlace(p.shape, sequence, first + head, start); };
  const auto part = [&](std::int64_t unit) { return s.parts + (s.team > 1 ? unit * floats : 0); };
  const auto compute = [&](std::int64_t unit, int member) HWY_ATTR {
    const std::int64_t head = unit / s.panels, panel = unit % s.panels;
    panel_of_head(p, place(head), sequence.chunk(start), panel * kPanel, s.chunk(p.shape, decay, head),
                  PanelScratch(s.members + member * PanelScratch::floats(s.rows)), dstate + unit * s.rows * kPanel,
                  PanelSums(part(unit), s.key_stride, decay));
  };
  pool.run(s.heads, [&](std::int64_t head, int) HWY_ATTR {
    ChunkScratch c = s.chunk(p.shape, decay, head);
    load_chunk(p, place(head), c);
  });
  if (s.team > 1) pool.run(s.heads * s.panels, compute);
  for (std::int64_t head = 0; head < s.heads; ++head) {
    std::fill(sums.da, sums.dq, 0.0F);
    std::fill(sums.dg, sums.end, 0.0F);
    for (std::int64_t unit = head * s.panels; unit < (head + 1) * s.panels; ++unit) {
      if (s.team == 1) compute(unit, 0);
      add_rows(part(unit), floats, s.sums);
    }
    finish_head(p, place(head), s.chunk(p.shape, decay, head), sums);
  }
}

// Query head i_q of sequence n with all of its value heads, by the `team` threads of the pool; on the calling thread
// alone inside a task.
template <class T>
void RecurrentBwdHead(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int team,
                      ThreadPool& pool) {
  Arena arena(memory);
  const BwdScratch s(arena, p.shape, p.rule.decay, team);
  std::fill_n(memory, arena.bytes(), std::byte{0});  // rows beyond a chunk's tokens must hold finite numbers
  const Sequence sequence = sequence_of(p, n);
  const std::int64_t group = p.shape.group(), panel_floats = s.rows * kPanel;
  const PanelSums sums(s.sums, s.key_stride, p.rule.decay);
  for (std::int64_t unit = 0; unit < group * s.panels; ++unit) {
    load_panel(p.dfinal_state, p.shape, unit % s.panels * kPanel, s.dstate + unit * panel_floats, n,
               i_q * group + unit / s.panels);
  }
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const std::int64_t start = sequence.begin + chunk * kChunk;
    std::fill(sums.dq, sums.dg, 0.0F);
    for (std::int64_t i = 0; i < group; i += s.heads) {
      chunk_of_heads(p, sequence, i_q * group + i, start, s.dstate + i * s.panels * panel_floats, s, pool);
    }
    const ChunkPlace at(p.shape, sequence, i_q * group, start);
    const ChunkScratch c = s.chunk(p.shape, p.rule.decay, 0);
    for (std::int64_t r = 0; r < at.tokens; ++r) {
      finish_keys(p, at, r, c, sums.dq + r * s.key_stride, sums.dk + r * s.key_stride);
    }
  }
  for (std::int64_t unit = 0; unit < group * s.panels; ++unit) {
    store_panel(s.dstate + unit * panel_floats, p.dinitial_state, p.shape, unit % s.panels * kPanel, n,
                i_q * group + unit / s.panels);
  }
}

void RecurrentBwdFloat(const DeltaBackward<float>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int team,
                       ThreadPool& pool) {
  RecurrentBwdHead(p, n, i_q, memory, team, pool);
}

void RecurrentBwdBfloat16(const DeltaBackward<bfloat16>& p, std::int64_t n, std::int64_t i_q, std::byte* memory,
                          int team, ThreadPool& pool) {
  RecurrentBwdHead(p, n, i_q, memory, team, pool);
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(RecurrentBwdFloat);
HWY_EXPORT(RecurrentBwdBfloat16);
HWY_EXPORT(RecurrentBwdBytes);

void head(const DeltaBackward<float>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int team,
          ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(RecurrentBwdFloat)(p, n, i_q, memory, team, pool);
}
void head(const DeltaBackward<bfloat16>& p, std::int64_t n, std::int64_t i_q, std::byte* memory, int team,
          ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(RecurrentBwdBfloat16)(p, n, i_q, memory, team, pool);
}

std::size_t head_bytes(const DeltaShape& shape, const DeltaRule& rule, int team) {
  return HWY_DYNAMIC_DISPATCH(RecurrentBwdBytes)(shape, rule.decay, team);
}

}  // namespace

std::size_t recurrent_bwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return team_workspace_bytes(threads, [&](int team) { return head_bytes(shape, rule, team); });
}

template <class T>
void recurrent_bwd(const DeltaBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  for_each_head(p.shape.sequences() * p.shape.heads, workspace, pool, [&](std::int64_t i, std::byte* memory, int team) {
    head(p, i / p.shape.heads, i % p.shape.heads, memory, team, pool);
  });
}

template void recurrent_bwd(const DeltaBackward<float>&, Workspace, ThreadPool&);
template void recurrent_bwd(const DeltaBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
