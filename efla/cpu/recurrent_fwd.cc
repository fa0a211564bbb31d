// The token recurrence (EFLA paper, equation 20), two tokens at a time: the state is swept once for both, with one
// load, one store and six multiply-adds an element. The sweep makes the updates of the two tokens before, S ← S + k uᵀ,
// and sums e = Sᵀk and r = Sᵀq for the next two, t and t + 1, from the state before them. Then
//
//   u_t = b_t v_t − a_t e_t,                                o_t = r_t + (k_t·q_t) u_t,
//   u_{t+1} = b_{t+1} v_{t+1} − a_{t+1} (e_{t+1} + (k_t·k_{t+1}) u_t),
//   o_{t+1} = r_{t+1} + (k_t·q_{t+1}) u_t + (k_{t+1}·q_{t+1}) u_{t+1}.
//
// (Token by token the stores of the state take longer than the arithmetic.) V is cut into slices whose state stays in
// the first-level cache for a chunk of tokens.
//
// A decay leaves the sweep as it is: what is kept is S' with S_t = diag(c_t) S'_t, c_t the product of the decays so
// far, and the tokens' rows carry c:
//
//   S̃_tᵀk_t = S'_{t−1}ᵀ (c_t ⊙ k_t),    S'_t = S'_{t−1} + (k_t ⊘ c_t) u_tᵀ
//
// c returns to 1, and S' to S, after every chunk and before a token that would take c out of [2⁻⁴⁰, 2⁴⁰]. So nothing
// overflows or is lost at any decay, and rounding is that of products, not of differences of logarithms.
#include <unistd.h>

#include "efla/cpu/delta.h"
#include "efla/cpu/heads_parts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/recurrent_fwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

constexpr float kSmallestScale = 0x1p-40F, kLargestScale = 0x1p40F;
// Panels in one sweep: as many as AVX-512's 32 registers hold.
constexpr int kTogether = HWY_TARGET <= HWY_AVX3 ? 2 : 1;

// The panels of a slice take at most two thirds of the first-level cache.
std::int64_t panels_per_slice(const DeltaShape& shape) {
  static const long cache = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  const std::int64_t bytes = (cache > 0 ? cache : 32 << 10) * 2 / 3;
  return std::max<std::int64_t>(1, bytes / (shape.key_dim * kPanel * static_cast<std::int64_t>(sizeof(float))));
}

struct FwdScratch {
  ChunkScratch chunk;
  float* state = nullptr;       // panels [K, kPanel]: S'
  float* scales = nullptr;      // [kChunk, Kp]: rows of tokens with `settles`; laid out only where the rule has a decay
  float* no_key = nullptr;      // [Kp] zeros
  float* out_factor = nullptr;  // [kChunk] scale, times c where that is one number
  float* kq = nullptr;          // [kChunk] k_t·q_t
  float* before_k = nullptr;    // [kChunk] k_{t−1}·k_t, with the k_{t−1} that is written
  float* before_q = nullptr;    // [kChunk] k_{t−1}·q_t
  float* values = nullptr;      // panels [kChunk, kPanel]
  float* out = nullptr;         // panels [kChunk, kPanel]
  float* u = nullptr;           // panels [2, kPanel]: the updates that are still to be made
  bool settles[kChunk] = {};    // S' ← scales ⊙ S' before the token

  void lay_out(Arena& arena, const DeltaShape& shape, Decay decay, std::int64_t heads) {
    chunk.lay_out(arena, shape, decay);
    if (decay == Decay::scalar) {  // c is in the gains
      chunk.q_read = chunk.q;
      chunk.k_read = chunk.k_write = chunk.k;
    }
    const std::int64_t padded_values = round_up(shape.value_dim, kPanel);
    state = arena.floats(heads * shape.key_dim * padded_values);
    if (decay != Decay::none) scales = arena.floats(kChunk * chunk.key_stride);
    no_key = arena.floats(chunk.key_stride);
    for (float** factors : {&out_factor, &kq, &before_k, &before_q}) *factors = arena.floats(kChunk);
    for (float** panels : {&values, &out}) *panels = arena.floats(kChunk * padded_values);
    u = arena.floats(2 * padded_values);
  }
};

std::size_t FwdBytesPerWorker(const DeltaShape& shape, Decay decay, std::int64_t heads) {
  Arena arena;
  FwdScratch().lay_out(arena, shape, decay, heads);
  return arena.bytes();
}

// One row of K for each of two tokens; the second is FwdScratch::no_key where there is one token alone.
struct PairOfRows {
  const float* row[2];
};

// Two vectors of columns for each of two tokens.
struct PairOfColumns {
  FloatVec of[2][kVectors];
};

// P neighbouring panels: with kWrite, S' ← S' + Σ written uᵀ; then e = S'ᵀk and r = S'ᵀq.
template <bool kWrite, int P>
HWY_INLINE void sweep(float* HWY_RESTRICT state, std::int64_t key_dim, const PairOfRows& written,
                      const float* HWY_RESTRICT u, const PairOfRows& k, const PairOfRows& q, PairOfColumns* e,
                      PairOfColumns* r) {
  const FloatTag d;
  constexpr int kAll = P * kVectors;
  FloatVec update[2][kAll], errors[2][kAll], readings[2][kAll];
  unroll<2>([&](auto t) EFLA_UNROLLED {
    unroll<kAll>([&](auto n) EFLA_UNROLLED {
      if constexpr (kWrite) {
        update[t][n] = hn::Load(d, u + n / kVectors * 2 * kPanel + t * kPanel + n % kVectors * kLanes);
      }
      errors[t][n] = readings[t][n] = hn::Zero(d);
    });
  });
  const std::int64_t next = key_dim * kPanel;
  for (std::int64_t i = 0; i < key_dim; ++i) {
    float* HWY_RESTRICT row = state + i * kPanel;
    FloatVec x[kAll];
    unroll<kAll>([&](auto n) EFLA_UNROLLED { x[n] = hn::Load(d, row + n / kVectors * next + n % kVectors * kLanes); });
    if constexpr (kWrite) {
      unroll<2>([&](auto t) EFLA_UNROLLED {
        const FloatVec by = hn::Set(d, written.row[t][i]);
        unroll<kAll>([&](auto n) EFLA_UNROLLED { x[n] = hn::MulAdd(by, update[t][n], x[n]); });
      });
      unroll<kAll>([&](auto n)
                       EFLA_UNROLLED { hn::Store(x[n], d, row + n / kVectors * next + n % kVectors * kLanes); });
    }
    unroll<2>([&](auto t) EFLA_UNROLLED {
      const FloatVec key = hn::Set(d, k.row[t][i]);
      unroll<kAll>([&](auto n) EFLA_UNROLLED { errors[t][n] = hn::MulAdd(key, x[n], errors[t][n]); });
      const FloatVec query = hn::Set(d, q.row[t][i]);
      unroll<kAll>([&](auto n) EFLA_UNROLLED { readings[t][n] = hn::MulAdd(query, x[n], readings[t][n]); });
    });
  }
  unroll<2>([&](auto t) EFLA_UNROLLED {
    unroll<kAll>([&](auto n) EFLA_UNROLLED {
      e[n / kVectors].of[t][n % kVectors] = errors[t][n];
      r[n / kVectors].of[t][n % kVectors] = readings[t][n];
    });
  });
}

// The updates that are still to be made, and S' ← scales ⊙ S' where there is a decay.
HWY_INLINE void settle(float* HWY_RESTRICT state, std::int64_t key_dim, const PairOfRows& written,
                       const float* HWY_RESTRICT u, const float* HWY_RESTRICT scales) {
  const FloatTag d;
  for (int n = 0; n < kVectors; ++n) {
    const FloatVec u0 = hn::Load(d, u + n * kLanes), u1 = hn::Load(d, u + kPanel + n * kLanes);
    for (std::int64_t i = 0; i < key_dim; ++i) {
      float* at = state + i * kPanel + n * kLanes;
      FloatVec x = hn::MulAdd(hn::Set(d, written.row[0][i]), u0, hn::Load(d, at));
      x = hn::MulAdd(hn::Set(d, written.row[1][i]), u1, x);
      if (scales != nullptr) x = hn::Mul(hn::Set(d, scales[i]), x);
      hn::Store(x, d, at);
    }
  }
}

// u and o of tokens r and, with `both`, r + 1 of the panel at column v.
HWY_INLINE void finish_pair(const FwdScratch& s, std::int64_t v, std::int64_t r, bool both, const PairOfColumns& e,
                            const PairOfColumns& reading) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  for (int n = 0; n < kVectors; ++n) {
    const std::int64_t at = v * kChunk + r * kPanel + n * kLanes;
    float* u = s.u + 2 * v + n * kLanes;
    const FloatVec u0 =
        hn::NegMulAdd(hn::Set(d, c.erase[r]), e.of[0][n], hn::Mul(hn::Set(d, c.write[r]), hn::Load(d, s.values + at)));
    const FloatVec o0 = hn::MulAdd(hn::Set(d, s.kq[r]), u0, reading.of[0][n]);
    hn::Store(u0, d, u);
    hn::Store(hn::Mul(hn::Set(d, s.out_factor[r]), o0), d, s.out + at);
    if (!both) {
      hn::Store(hn::Zero(d), d, u + kPanel);
      continue;
    }
    const FloatVec e1 = hn::MulAdd(hn::Set(d, s.before_k[r + 1]), u0, e.of[1][n]);
    const FloatVec u1 = hn::NegMulAdd(hn::Set(d, c.erase[r + 1]), e1,
                                      hn::Mul(hn::Set(d, c.write[r + 1]), hn::Load(d, s.values + at + kPanel)));
    const FloatVec o1 =
        hn::MulAdd(hn::Set(d, s.kq[r + 1]), u1, hn::MulAdd(hn::Set(d, s.before_q[r + 1]), u0, reading.of[1][n]));
    hn::Store(u1, d, u + kPanel);
    hn::Store(hn::Mul(hn::Set(d, s.out_factor[r + 1]), o1), d, s.out + at + kPanel);
  }
}

// The tokens of a chunk for the panels at columns [first, last), whose state is moved on. Calls ask(r) before token r.
template <class F>
HWY_INLINE void run_slice(const FwdScratch& s, std::int64_t tokens, std::int64_t key_dim, std::int64_t first,
                          std::int64_t last, const F& ask) {
  const ChunkScratch& c = s.chunk;
  const auto rows = [&](const float* all, std::int64_t r, bool both) HWY_ATTR {
    return PairOfRows{{all + r * c.key_stride, both ? all + (r + 1) * c.key_stride : s.no_key}};
  };
  const auto settle_panels = [&](const PairOfRows& written, const float* scales) HWY_ATTR {
    for (std::int64_t v = first; v < last; v += kPanel) {
      settle(s.state + v * key_dim, key_dim, written, s.u + 2 * v, scales);
    }
  };
  std::fill(s.u + 2 * first, s.u + 2 * last, 0.0F);
  PairOfRows written{{s.no_key, s.no_key}};
  bool updates = false;  // whether some are still to be made
  for (std::int64_t r = 0, count = 0; r < tokens; r += count) {
    const bool both = r + 1 < tokens && !s.settles[r + 1];
    count = both ? 2 : 1;
    ask(r);
    if (s.settles[r]) settle_panels(written, s.scales + r * c.key_stride);
    const bool writes = updates && !s.settles[r];
    const PairOfRows k = rows(c.k_read, r, both), q = rows(c.q_read, r, both);
    const auto sweep_panels = [&](std::int64_t v, auto count) EFLA_UNROLLED {
      PairOfColumns e[count], reading[count];
      if (writes) {
        sweep<true, count>(s.state + v * key_dim, key_dim, written, s.u + 2 * v, k, q, e, reading);
      } else {
        sweep<false, count>(s.state + v * key_dim, key_dim, written, s.u + 2 * v, k, q, e, reading);
      }
      for (int i = 0; i < count; ++i) finish_pair(s, v + i * kPanel, r, both, e[i], reading[i]);
    };
    std::int64_t v = first;
    for (; kTogether > 1 && v + kTogether * kPanel <= last; v += kTogether * kPanel) {
      sweep_panels(v, std::integral_constant<int, kTogether>());
    }
    for (; v < last; v += kPanel) sweep_panels(v, std::integral_constant<int, 1>());
    written = rows(c.k_write, r, both);
    updates = true;
  }
  settle_panels(written, c.decay.whole);
}

// A scalar decay: c goes into the gains. With u = c u', u' = (b / c) v − a S'ᵀk and o = scale c (S'ᵀq + (k·q) u').
HWY_INLINE void scale_gains(std::int64_t tokens, FwdScratch& s) {
  ChunkScratch& c = s.chunk;
  float scale = 1.0F;
  for (std::int64_t r = 0; r < tokens; ++r) {
    scale *= c.decay.token[r * c.key_stride];
    s.settles[r] = !(scale >= kSmallestScale && scale <= kLargestScale);
    if (s.settles[r]) {
      std::fill_n(s.scales + r * c.key_stride, c.key_stride, scale);
      scale = 1.0F;
    }
    c.write[r] /= scale;
    s.out_factor[r] *= scale;
  }
  std::fill_n(c.decay.whole, c.key_stride, scale);
}

// One decay a channel: the rows k ⊙ c, q ⊙ c and k ⊘ c.
HWY_INLINE void scale_keys(std::int64_t tokens, FwdScratch& s) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  std::fill_n(c.decay.whole, c.key_stride, 1.0F);
  for (std::int64_t r = 0; r < tokens; ++r) {
    const std::int64_t row = r * c.key_stride;
    float* scales = s.scales + row;
    auto inside = hn::FirstN(d, kLanes);
    for (std::int64_t i = 0; i < c.key_stride; i += kLanes) {
      const FloatVec scale = hn::Mul(hn::Load(d, c.decay.whole + i), hn::Load(d, c.decay.token + row + i));
      hn::Store(scale, d, scales + i);
      inside = hn::And(inside, hn::Ge(scale, hn::Set(d, kSmallestScale)));
      inside = hn::And(inside, hn::Le(scale, hn::Set(d, kLargestScale)));
    }
    s.settles[r] = !hn::AllTrue(d, inside);
    for (std::int64_t i = 0; i < c.key_stride; i += kLanes) {
      const FloatVec scale = s.settles[r] ? hn::Set(d, 1.0F) : hn::Load(d, scales + i);
      const FloatVec k = hn::Load(d, c.k + row + i);
      hn::Store(scale, d, c.decay.whole + i);
      hn::Store(hn::Mul(scale, k), d, c.k_read + row + i);
      hn::Store(hn::Mul(scale, hn::Load(d, c.q + row + i)), d, c.q_read + row + i);
      hn::Store(hn::Div(k, scale), d, c.k_write + row + i);
    }
  }
}

// q, k, v, gains and decays of a chunk, and what the sweeps take of them.
template <class T>
HWY_INLINE void load_tokens(const DeltaForward<T>& p, const ChunkPlace& at, std::int64_t first, std::int64_t last,
                            FwdScratch& s) {
  const ChunkScratch& c = s.chunk;
  load_chunk(p, at, s.chunk);
  load_values(p.v, at, first, last, 1.0F, s.values);
  std::fill_n(s.out_factor, at.tokens, static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
  if (p.rule.decay == Decay::scalar) scale_gains(at.tokens, s);
  if (p.rule.decay == Decay::channel) scale_keys(at.tokens, s);
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    const std::int64_t row = r * c.key_stride;
    s.kq[r] = dot(c.k_write + row, c.q_read + row, c.key_stride);
    if (r == 0) continue;
    s.before_k[r] = dot(c.k_write + row - c.key_stride, c.k_read + row, c.key_stride);
    s.before_q[r] = dot(c.k_write + row - c.key_stride, c.q_read + row, c.key_stride);
  }
}

// All tokens of a part, chunk by chunk and within a chunk head by head. A column's arithmetic does not depend on which
// other columns are computed beside it, so neither do its bits.
template <class T>
void RecurrentFwdPart(const DeltaForward<T>& p, const HeadsPart& part, std::byte* memory) {
  Arena arena(memory);
  FwdScratch s;
  s.lay_out(arena, p.shape, p.rule.decay, part.head_end - part.head);
  std::fill_n(s.no_key, s.chunk.key_stride, 0.0F);
  const Sequence sequence = sequence_of(p, part.n);
  const std::int64_t key_dim = p.shape.key_dim;
  const std::int64_t first = part.panel * kPanel, last = std::min(part.panel_end * kPanel, p.shape.value_dim);
  const std::int64_t width = panels_per_slice(p.shape) * kPanel;
  const bool streams = streams_states(p);
  const std::int64_t slices = (last - first + width - 1) / width;
  float* const states = s.state;
  const std::int64_t state_floats = key_dim * round_up(p.shape.value_dim, kPanel);
  for (std::int64_t i_h = part.head; i_h < part.head_end; ++i_h) {
    load_state_panels(p.initial_state, first, last, key_dim, states + (i_h - part.head) * state_floats, part.n, i_h);
  }
  for (std::int64_t start = sequence.begin; start < sequence.end; start += kChunk) {
    for (std::int64_t i_h = part.head; i_h < part.head_end; ++i_h) {
      const ChunkPlace at(p.shape, sequence, i_h, start);
      s.state = states + (i_h - part.head) * state_floats;
      load_tokens(p, at, first, last, s);
      store_chunk_state(s.state, p.chunk_states, streams, first, last, key_dim, at.i_b, sequence.chunk(start), i_h);
      const bool more_heads = i_h + 1 < part.head_end;
      const ChunkPlace next(p.shape, sequence, more_heads ? i_h + 1 : part.head, more_heads ? start : start + kChunk);
      std::int64_t asked = 0;
      for (std::int64_t i = 0; i < slices; ++i) {
        const std::int64_t v = first + i * width;
        run_slice(s, at.tokens, key_dim, v, std::min(v + width, round_up(last, kPanel)), [&](std::int64_t r) HWY_ATTR {
          const std::int64_t until = std::min((i * kChunk + r + 2) / slices, next.tokens);
          for (; asked < until; ++asked) prefetch_token(p, next, next.start + asked, first, last);
        });
      }
      store_values(s.out, at, first, last, 1.0F, p.o);
    }
  }
  for (std::int64_t i_h = part.head; i_h < part.head_end; ++i_h) {
    store_state_panels(states + (i_h - part.head) * state_floats, p.final_state, first, last, key_dim, part.n, i_h);
  }
  if (streams) hwy::FlushStream();
}

void RecurrentFwdFloat(const DeltaForward<float>& p, const HeadsPart& part, std::byte* memory) {
  RecurrentFwdPart(p, part, memory);
}

void RecurrentFwdBfloat16(const DeltaForward<bfloat16>& p, const HeadsPart& part, std::byte* memory) {
  RecurrentFwdPart(p, part, memory);
}

std::int64_t RecurrentPanelWidth() { return kPanel; }

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(RecurrentFwdFloat);
HWY_EXPORT(RecurrentFwdBfloat16);
HWY_EXPORT(FwdBytesPerWorker);
HWY_EXPORT(RecurrentPanelWidth);

void compute(const DeltaForward<float>& p, const HeadsPart& part, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(RecurrentFwdFloat)(p, part, memory);
}
void compute(const DeltaForward<bfloat16>& p, const HeadsPart& part, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(RecurrentFwdBfloat16)(p, part, memory);
}

}  // namespace

std::size_t recurrent_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return HWY_DYNAMIC_DISPATCH(FwdBytesPerWorker)(shape, rule.decay, heads_together(shape, threads)) *
         static_cast<std::size_t>(threads);
}

template <class T>
void recurrent_fwd(const DeltaForward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t width = HWY_DYNAMIC_DISPATCH(RecurrentPanelWidth)();
  for_each_part(p.shape, (p.shape.value_dim + width - 1) / width, workspace, pool,
                [&](const HeadsPart& part, std::byte* memory) { compute(p, part, memory); });
}

template void recurrent_fwd(const DeltaForward<float>&, Workspace, ThreadPool&);
template void recurrent_fwd(const DeltaForward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
