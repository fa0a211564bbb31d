// The gradients of the token recurrence for a panel of value columns and a chunk of tokens. Walks forward from the
// state saved before the chunk and keeps S̃_t = D_t S_{t−1} and u_t = b v − a e, e = S̃ᵀ k, of every token. Then walks
// back, with dS the gradient with respect to S_t and dO scaled:
//
//   dS += q dOᵀ,   dk = dS u,   du = dSᵀ k,   dv = b du,   db = vᵀ du,   da = −eᵀ du,   de = −a du
//   dS += k deᵀ,   dq = S̃ dO + k (uᵀ dO),   dk += S̃ de,   dg = rowsum(dS ∘ S̃),   dS ← D dS
//
// The first line reads all of dS before the second changes it. One sweep over the rows of dS therefore ends a token
// (its second line) and begins the token before it (the first line). Included once per target.
#if defined(EFLA_CPU_RECURRENT_BWD_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_RECURRENT_BWD_PANEL_INL_H_
#undef EFLA_CPU_RECURRENT_BWD_PANEL_INL_H_
#else
#define EFLA_CPU_RECURRENT_BWD_PANEL_INL_H_
#endif

#include "efla/cpu/delta/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Returns the rows of a state's panel [rows, kPanel]: K rounded up to whole blocks; the rows beyond K are zero.
inline std::int64_t state_rows(const DeltaShape& shape) { return round_up(shape.key_dim, kBlock); }

// The sums of panels for the gradients of a chunk, as consecutive arrays.
struct PanelSums {
  float *da, *db;  // [kChunk, kLanes] partial sums of a value head
  float *dq, *dk;  // [kChunk, Kp] of the query head
  float* dg;       // [kChunk, Kp] of a value head, with a decay; for a scalar gate the channels are summed at the end
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

// Scratch of one thread for a panel.
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

HWY_INLINE float sum_of(FloatVec x) { return hn::GetLane(hn::SumOfLanes(FloatTag(), x)); }

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
  // Returns sums whose lanes add up to the inner product with x.
  HWY_INLINE FloatVec dot(const PanelRow& x) const { return hn::MulAdd(v1, x.v1, hn::Mul(v0, x.v0)); }
};

// Returns the row [Kp] of token r.
HWY_INLINE const float* row_of(const float* rows, const ChunkScratch& c, std::int64_t r) {
  return rows + r * c.key_stride;
}

// Computes S̃_r from the state after the previous token, S̃_{r−1} + k uᵀ (for the first token from the chunk's own state
// in states[0]), and with it e and u.
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
      PanelRow& error = (kBlock == 1 ? first : m) % 2 == 0 ? even : odd;  // in the forward's order, for the same bits
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

// Sweeps once over a panel of dS: ends token `r` (kEnd) with the gradient de of its error, and begins token r − 1
// (kBegin). Returns du of token r − 1.
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

// Computes dv from du of token r and adds the token's terms to da and db. Returns de.
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

// Walks over the tokens of a chunk, forward and back.
template <bool kDecay>
HWY_NOINLINE void walk(const ChunkScratch& c, std::int64_t tokens, std::int64_t rows, const PanelScratch& s,
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

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
