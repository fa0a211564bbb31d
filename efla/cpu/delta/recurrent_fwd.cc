// The token recurrence (equation 20 of EFLA, arXiv 2512.12602), two tokens at a time: one sweep of the state for both,
// with one load, one store and six multiply-adds per element. The sweep applies the updates of the two previous tokens,
// S ← S + k uᵀ, and sums e = Sᵀk and r = Sᵀq of the next two, t and t + 1, from the state before them. Then
//
//   u_t = b_t v_t − a_t e_t,                                o_t = r_t + (k_t·q_t) u_t,
//   u_{t+1} = b_{t+1} v_{t+1} − a_{t+1} (e_{t+1} + (k_t·k_{t+1}) u_t),
//   o_{t+1} = r_{t+1} + (k_t·q_{t+1}) u_t + (k_{t+1}·q_{t+1}) u_{t+1}.
//
// With one token per sweep, the stores of the state would take longer than the arithmetic. V is cut into slices whose
// state stays in the first-level cache for a chunk of tokens. docs/design/2026-11-recurrent-forward.md explains the
// design, and head_range.h the division into tasks.
//
// A decay does not change the sweep: the stored state is S' with S_t = diag(c_t) S'_t, where c_t is the product of the
// decays so far, and the tokens' rows carry c:
//
//   S̃_tᵀk_t = S'_{t−1}ᵀ (c_t ⊙ k_t),    S'_t = S'_{t−1} + (k_t ⊘ c_t) u_tᵀ
//
// With two keys κ takes the place of k in what is read: e = Sᵀκ, κ_{t+1} in k_t·k_{t+1}, and c_t ⊙ κ_t.
//
// c is reset to 1, and S' to S, after every chunk and before a token that would take c out of [2⁻⁴⁰, 2]. Nothing
// overflows or is lost for any decay. With a smaller c, S' and k ⊘ c could overflow; with a larger c, they could lose
// digits below the normal numbers. A token whose k ⊙ c or q ⊙ c might lose digits, because an element is small, resets
// c too. The decays are rounded like products; a difference of sums of g would lose digits.
#include <unistd.h>

#include <bit>
#include <cmath>

#include "efla/cpu/common/head_range.h"
#include "efla/cpu/common/prefetch_list.h"
#include "efla/cpu/delta/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/delta/recurrent_fwd.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/delta/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {
namespace {

constexpr float kSmallestScale = 0x1p-40F, kLargestScale = 2.0F;
constexpr float kSmallestFactor = 0x1p-126F / kSmallestScale;  // the least number whose product with c is normal
// Panels per sweep: two if the target has the 32 registers of AVX-512.
constexpr int kTogether = HWY_TARGET <= HWY_AVX3 ? 2 : 1;

// Rows of the state between two prefetches for the next chunk.
constexpr int kRowsPerPrefetch = 8;

// Returns the panels per slice: the state of a slice takes at most two thirds of the first-level cache, or is one
// panel.
std::int64_t panels_per_slice(const DeltaShape& shape) {
#ifdef _SC_LEVEL1_DCACHE_SIZE  // glibc has it
  static const long cache = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
  constexpr long cache = 0;
#endif
  const std::int64_t bytes = (cache > 0 ? cache : 32 << 10) * 2 / 3;
  return std::max<std::int64_t>(1, bytes / (shape.key_dim * kPanel * static_cast<std::int64_t>(sizeof(float))));
}

struct FwdScratch {
  ChunkScratch chunk;
  PrefetchList prefetches;
  float* state = nullptr;       // panels [K, kPanel]: S'
  float* scales = nullptr;      // [kChunk, Kp]: c of tokens with `applies_pending`; only with a decay
  float* no_key = nullptr;      // [Kp] zeros
  float* out_factor = nullptr;  // [kChunk] scale, times c if c is one number
  float* products = nullptr;  // [kChunk, 4] k_t·q_t, k_{t−1}·κ_t, k_{t−1}·q_t (with the written k) and κ_t·k_t
  float* values = nullptr;    // [kChunk, Vp] of v's type, if the caller's v or o cannot be used directly
  float* out = nullptr;       // [kChunk, Vp], likewise
  float* u = nullptr;         // [2, Vp]: the pending updates
  std::int64_t value_stride = 0;      // Vp
  bool applies_pending[kChunk] = {};  // whether S' ← scales ⊙ S' before the token

  void lay_out(Arena& arena, const DeltaShape& shape, Decay decay, std::int64_t heads) {
    chunk.lay_out(arena, shape, decay);
    prefetches = PrefetchList(PrefetchList::lay_out(arena, prefetch_addresses(shape)));
    if (decay == Decay::scalar) {  // c is in the gains
      chunk.q_read = chunk.q;
      chunk.k_read = chunk.k_write = chunk.k;
      if constexpr (kTwoKeys) chunk.k_read = chunk.erase_keys();
    }
    value_stride = round_up(shape.value_dim, kPanel);
    state = arena.floats(heads * shape.key_dim * value_stride);
    if (decay != Decay::none) scales = arena.floats(kChunk * chunk.key_stride);
    no_key = arena.floats(chunk.key_stride);
    out_factor = arena.floats(kChunk);
    products = arena.floats(4 * kChunk);
    for (float** rows : {&values, &out}) *rows = arena.floats(kChunk * value_stride);
    u = arena.floats(2 * value_stride);
  }
};

std::size_t FwdBytesPerWorker(const DeltaShape& shape, Decay decay, std::int64_t heads) {
  Arena arena;
  FwdScratch().lay_out(arena, shape, decay, heads);
  return arena.bytes();
}

// A row [K] of q or k of each of two tokens. The second row is FwdScratch::no_key if there is only one token.
struct PairOfRows {
  const float* row[2];
};

// Rows of v and o, from their first column on, and the factors of the two tokens' updates and outputs.
template <class T>
struct PairOfTokens {
  bool both;
  const T* value[2];
  T* out[2];
  float erase[2], write[2], out_factor[2];
  const float* products[2];
};

// Computes u and o of the pair from e and r.
template <int kAll, class T>
HWY_INLINE void finish_pair(const PairOfTokens<T>& pair, std::int64_t column, const FloatVec (&e)[2][kAll],
                            const FloatVec (&r)[2][kAll], float* HWY_RESTRICT u, std::int64_t u_stride) {
  const FloatTag d;
  FloatVec u0[kAll];
  {
    const FloatVec erase = hn::Set(d, pair.erase[0]), write = hn::Set(d, pair.write[0]);
    const FloatVec kq = hn::Set(d, pair.products[0][0]), factor = hn::Set(d, pair.out_factor[0]);
    unroll<kAll>([&](auto n) EFLA_UNROLLED {
      const std::int64_t at = column + n * kLanes;
      u0[n] = hn::NegMulAdd(erase, e[0][n], hn::Mul(write, load(d, pair.value[0] + at)));
      hn::Store(u0[n], d, u + at);
      store(d, hn::Mul(factor, hn::MulAdd(kq, u0[n], r[0][n])), pair.out[0] + at);
    });
  }
  if (!pair.both) {
    unroll<kAll>([&](auto n) EFLA_UNROLLED { hn::Store(hn::Zero(d), d, u + u_stride + column + n * kLanes); });
    return;
  }
  const FloatVec erase = hn::Set(d, pair.erase[1]), write = hn::Set(d, pair.write[1]);
  const FloatVec kq = hn::Set(d, pair.products[1][0]), factor = hn::Set(d, pair.out_factor[1]);
  const FloatVec before_k = hn::Set(d, pair.products[1][1]), before_q = hn::Set(d, pair.products[1][2]);
  unroll<kAll>([&](auto n) EFLA_UNROLLED {
    const std::int64_t at = column + n * kLanes;
    const FloatVec error = hn::MulAdd(before_k, u0[n], e[1][n]);
    const FloatVec u1 = hn::NegMulAdd(erase, error, hn::Mul(write, load(d, pair.value[1] + at)));
    hn::Store(u1, d, u + u_stride + at);
    store(d, hn::Mul(factor, hn::MulAdd(kq, u1, hn::MulAdd(before_q, u0[n], r[1][n]))), pair.out[1] + at);
  });
}

// Sweeps over P neighbouring panels from `column` on. With kWrite, first S' ← S' + Σ written uᵀ. Then sums e = S'ᵀk and
// r = S'ᵀq, and computes u and o from these sums. Prefetches one address per kRowsPerPrefetch rows of the state.
template <bool kWrite, int P, class T>
HWY_INLINE void sweep(float* state, std::int64_t key_dim, const PairOfRows& written, float* u, std::int64_t u_stride,
                      const PairOfRows& k, const PairOfRows& q, const PairOfTokens<T>& pair, std::int64_t column,
                      PrefetchList& prefetches) {
  const FloatTag d;
  constexpr int kAll = P * kVectors;
  FloatVec update[2][kAll], errors[2][kAll], readings[2][kAll];
  unroll<2>([&](auto t) EFLA_UNROLLED {
    unroll<kAll>([&](auto n) EFLA_UNROLLED {
      if constexpr (kWrite) update[t][n] = hn::Load(d, u + t * u_stride + column + n * kLanes);
      errors[t][n] = readings[t][n] = hn::Zero(d);
    });
  });
  const std::int64_t next = key_dim * kPanel;
  float* panels = state + column * key_dim;
  const auto add_row = [&](std::int64_t i) EFLA_UNROLLED {
    float* row = panels + i * kPanel;
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
  };
  PrefetchList next_rows = prefetches;  // a copy in registers
  std::int64_t i = 0;
  for (; i + kRowsPerPrefetch <= key_dim; i += kRowsPerPrefetch) {
    next_rows.prefetch_next();
    unroll<kRowsPerPrefetch>([&](auto n) EFLA_UNROLLED { add_row(i + n); });
  }
  for (; i < key_dim; ++i) add_row(i);
  prefetches = next_rows;
  finish_pair<kAll>(pair, column, errors, readings, u, u_stride);
}

// Applies the pending updates of P neighbouring panels from `column` on, and with a decay S' ← scales ⊙ S'.
template <int P>
HWY_INLINE void apply_pending(float* HWY_RESTRICT state, std::int64_t key_dim, const PairOfRows& written,
                              const float* HWY_RESTRICT u, std::int64_t u_stride, std::int64_t column,
                              const float* HWY_RESTRICT scales) {
  const FloatTag d;
  constexpr int kAll = P * kVectors;
  FloatVec update[2][kAll];
  unroll<2>([&](auto t) EFLA_UNROLLED {
    unroll<kAll>([&](auto n) EFLA_UNROLLED { update[t][n] = hn::Load(d, u + t * u_stride + column + n * kLanes); });
  });
  const std::int64_t next = key_dim * kPanel;
  float* HWY_RESTRICT panels = state + column * key_dim;
  for (std::int64_t i = 0; i < key_dim; ++i) {
    float* HWY_RESTRICT row = panels + i * kPanel;
    const FloatVec by0 = hn::Set(d, written.row[0][i]), by1 = hn::Set(d, written.row[1][i]);
    unroll<kAll>([&](auto n) EFLA_UNROLLED {
      float* at = row + n / kVectors * next + n % kVectors * kLanes;
      FloatVec x = hn::MulAdd(by1, update[1][n], hn::MulAdd(by0, update[0][n], hn::Load(d, at)));
      if (scales != nullptr) x = hn::Mul(hn::Set(d, scales[i]), x);
      hn::Store(x, d, at);
    });
  }
}

// Calls f(column, P) for groups of P neighbouring panels that cover columns [first, last): kTogether, then one by one.
template <class F>
HWY_INLINE void for_panels(std::int64_t first, std::int64_t last, const F& f) {
  std::int64_t v = first;
  for (; kTogether > 1 && v + kTogether * kPanel <= last; v += kTogether * kPanel) {
    f(v, std::integral_constant<int, kTogether>());
  }
  for (; v < last; v += kPanel) f(v, std::integral_constant<int, 1>());
}

// Rows of a chunk of v and of o, with one row per token.
template <class T>
struct ValueRows {
  const T* v;
  std::int64_t v_stride;
  T* o;
  std::int64_t o_stride;
};

// Computes the tokens of a chunk for the panels at columns [first, last) and advances their state. Prefetches
// `prefetch_count` addresses before each pair of tokens, in addition to the sweeps' prefetches.
template <class T>
HWY_INLINE void run_slice(FwdScratch& s, std::int64_t tokens, std::int64_t key_dim, std::int64_t first,
                          std::int64_t last, const ValueRows<T>& values, std::int64_t prefetch_count) {
  const ChunkScratch& c = s.chunk;
  const auto rows = [&](const float* all, std::int64_t r, bool both) HWY_ATTR {
    return PairOfRows{{all + r * c.key_stride, both ? all + (r + 1) * c.key_stride : s.no_key}};
  };
  const auto apply_pending_panels = [&](const PairOfRows& written, const float* scales) HWY_ATTR {
    for_panels(first, last, [&](std::int64_t v, auto count) EFLA_UNROLLED {
      apply_pending<count>(s.state, key_dim, written, s.u, s.value_stride, v, scales);
    });
  };
  for (int t = 0; t < 2; ++t) std::fill(s.u + t * s.value_stride + first, s.u + t * s.value_stride + last, 0.0F);
  PairOfRows written{{s.no_key, s.no_key}};
  bool updates = false;  // whether there are pending updates
  for (std::int64_t r = 0, count = 0; r < tokens; r += count) {
    const bool both = r + 1 < tokens && !s.applies_pending[r + 1];
    count = both ? 2 : 1;
    if (s.applies_pending[r]) apply_pending_panels(written, s.scales + r * c.key_stride);
    const bool writes = updates && !s.applies_pending[r];
    for (std::int64_t i = 0; i < prefetch_count; ++i) s.prefetches.prefetch_next();
    const PairOfRows k = rows(c.k_read, r, both), q = rows(c.q_read, r, both);
    PairOfTokens<T> pair{};
    pair.both = both;
    for (int t = 0; t < count; ++t) {
      pair.value[t] = values.v + (r + t) * values.v_stride;
      pair.out[t] = values.o + (r + t) * values.o_stride;
      pair.erase[t] = c.erase[r + t];
      pair.write[t] = c.write[r + t];
      pair.out_factor[t] = s.out_factor[r + t];
      pair.products[t] = s.products + 4 * (r + t);
    }
    for_panels(first, last, [&](std::int64_t v, auto count) EFLA_UNROLLED {
      if (writes) {
        sweep<true, count>(s.state, key_dim, written, s.u, s.value_stride, k, q, pair, v, s.prefetches);
      } else {
        sweep<false, count>(s.state, key_dim, written, s.u, s.value_stride, k, q, pair, v, s.prefetches);
      }
    });
    written = rows(c.k_write, r, both);
    updates = true;
  }
  apply_pending_panels(written, c.decay.whole);
}

// Puts the c of a scalar gate into the write gains and the output factors, and finds the tokens before which the
// pending updates are applied. With u = c u', u' = (b / c) v − a S'ᵀk and o = scale c (S'ᵀq + (k·q) u').
HWY_INLINE void scale_gains(std::int64_t tokens, FwdScratch& s) {
  ChunkScratch& c = s.chunk;
  float scale = 1.0F;
  for (std::int64_t r = 0; r < tokens; ++r) {
    scale *= c.decay.token[r * c.key_stride];
    const bool is_small = s.out_factor[r] != 0.0F && std::abs(s.out_factor[r]) < kSmallestFactor;
    s.applies_pending[r] = is_small || !(scale >= kSmallestScale && scale <= kLargestScale);
    if (s.applies_pending[r]) {
      std::fill_n(s.scales + r * c.key_stride, c.key_stride, scale);
      scale = 1.0F;
    }
    c.write[r] /= scale;
    s.out_factor[r] *= scale;
  }
  std::fill_n(c.decay.whole, c.key_stride, scale);
}

// Returns whether a row of k or q has an element, other than 0, whose product with a small c is below the normal
// numbers and has fewer digits.
HWY_INLINE bool has_small_elements(const float* k, const float* q, std::int64_t count) {
  const hn::RebindToUnsigned<FloatTag> du;
  const auto magnitude = hn::Set(du, 0x7fffffffU), one = hn::Set(du, 1U);
  auto least = magnitude;
  const auto add = [&](const float* x) EFLA_UNROLLED {
    const auto bits = hn::And(hn::BitCast(du, hn::Load(FloatTag(), x)), magnitude);
    least = hn::Min(least, hn::Sub(bits, one));  // minus 1, so that 0 becomes the largest number
  };
  for (std::int64_t i = 0; i < count; i += kLanes) {
    add(k + i);
    add(q + i);
  }
  return !hn::AllFalse(du, hn::Lt(least, hn::Set(du, std::bit_cast<std::uint32_t>(kSmallestFactor) - 1)));
}

// Puts the c of a channel gate into rows: κ ⊙ c, q ⊙ c and k ⊘ c. Finds the tokens as scale_gains does.
HWY_INLINE void scale_keys(std::int64_t tokens, FwdScratch& s) {
  const FloatTag d;
  const ChunkScratch& c = s.chunk;
  std::fill_n(c.decay.whole, c.key_stride, 1.0F);
  for (std::int64_t r = 0; r < tokens; ++r) {
    const std::int64_t row = r * c.key_stride, erase_row = kTwoKeys ? row + kChunk * c.key_stride : row;
    float* scales = s.scales + row;
    auto inside = hn::FirstN(d, kLanes);
    for (std::int64_t i = 0; i < c.key_stride; i += kLanes) {
      const FloatVec scale = hn::Mul(hn::Load(d, c.decay.whole + i), hn::Load(d, c.decay.token + row + i));
      hn::Store(scale, d, scales + i);
      inside = hn::And(inside, hn::Ge(scale, hn::Set(d, kSmallestScale)));
      inside = hn::And(inside, hn::Le(scale, hn::Set(d, kLargestScale)));
    }
    s.applies_pending[r] = !hn::AllTrue(d, inside) || has_small_elements(c.k + erase_row, c.q + row, c.key_stride);
    for (std::int64_t i = 0; i < c.key_stride; i += kLanes) {
      const FloatVec scale = s.applies_pending[r] ? hn::Set(d, 1.0F) : hn::Load(d, scales + i);
      const FloatVec k = hn::Load(d, c.k + row + i);
      hn::Store(scale, d, c.decay.whole + i);
      if constexpr (kTwoKeys) {
        hn::Store(hn::Mul(scale, hn::Load(d, c.k + erase_row + i)), d, c.k_read + row + i);
      } else {
        hn::Store(hn::Mul(scale, k), d, c.k_read + row + i);
      }
      hn::Store(hn::Mul(scale, hn::Load(d, c.q + row + i)), d, c.q_read + row + i);
      hn::Store(hn::Div(k, scale), d, c.k_write + row + i);
    }
  }
}

// Loads q, k, gains and decays of a chunk, and computes the inputs of the sweeps.
template <class T>
HWY_INLINE void load_tokens(const DeltaForward<T>& p, const ChunkPlace& at, FwdScratch& s) {
  const FloatTag d;
  ChunkScratch& c = s.chunk;
  load_inputs(p, at, c);
  if (p.rule.decay == Decay::channel) scale_keys(at.tokens, s);
  const float* before = s.no_key;
  for (std::int64_t r = 0; r < at.tokens; ++r) {
    const std::int64_t row = r * c.key_stride;
    FloatVec sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
    for (std::int64_t i = 0; i < c.key_stride; i += kLanes) {
      const FloatVec q = hn::Load(d, c.q_read + row + i), last = hn::Load(d, before + i);
      const FloatVec k = hn::Load(d, c.k + row + i);
      sums[0] = hn::MulAdd(hn::Load(d, c.k_write + row + i), q, sums[0]);
      sums[1] = hn::MulAdd(last, hn::Load(d, c.k_read + row + i), sums[1]);
      sums[2] = hn::MulAdd(last, q, sums[2]);
      if constexpr (kTwoKeys) {
        sums[3] = hn::MulAdd(hn::Load(d, c.erase_keys() + row + i), k, sums[3]);
      } else {
        sums[3] = hn::MulAdd(k, k, sums[3]);
      }
    }
    store_lane_sums(sums, s.products + 4 * r);
    c.lambda[r] = s.products[4 * r + 3];
    before = c.k_write + row;
  }
  compute_gains(at.tokens, p.rule.step, c);
  std::fill_n(s.out_factor, at.tokens, static_cast<float>(p.rule.scale_for(p.shape.key_dim)));
  if (p.rule.decay == Decay::scalar) scale_gains(at.tokens, s);
}

// Copies rows of a chunk of v, columns [first, last), with zeros up to the end of the last panel.
template <class T>
HWY_INLINE void copy_values(const View<const T, 4>& view, const ChunkPlace& at, std::int64_t first, std::int64_t last,
                            T* rows, std::int64_t row_stride) {
  for (std::int64_t r = 0; r < at.tokens; ++r, rows += row_stride) {
    const T* from = view.at(at.i_b, at.start + r, at.i_h);
    for (std::int64_t v = first; v < last; ++v) rows[v] = from[v * view.stride[3]];
    std::fill(rows + last, rows + round_up(last, kPanel), T{});
  }
}

// Copies rows of o, columns [first, last), to the caller's tensor: one row per token.
template <class T>
HWY_INLINE void copy_out(const ValueRows<T>& values, const ChunkPlace& at, std::int64_t first, std::int64_t last,
                         const View<T, 4>& view) {
  const MicroSteps::Tokens read = at.read();
  for (std::int64_t t = read.first; t < read.last; ++t) {
    T* to = view.at(at.i_b, t, at.i_h);
    const T* from = values.o + read.step_row(t) * values.o_stride;
    for (std::int64_t v = first; v < last; ++v) to[v * view.stride[3]] = from[v];
  }
}

// Computes all tokens of a range, chunk by chunk and within a chunk head by head. The arithmetic of a column, and so
// its bits, does not depend on the other columns.
template <class T>
void RecurrentFwdRange(const DeltaForward<T>& p, const HeadRange& range, std::byte* memory) {
  Arena arena(memory);
  FwdScratch s;
  s.lay_out(arena, p.shape, p.rule.decay, range.head_end - range.head);
  std::fill_n(s.no_key, s.chunk.key_stride, 0.0F);
  const Sequence sequence = sequence_of(p, range.n);
  const std::int64_t key_dim = p.shape.key_dim;
  const std::int64_t first = range.panel * kPanel, last = std::min(range.panel_end * kPanel, p.shape.value_dim);
  const std::int64_t width = panels_per_slice(p.shape) * kPanel;
  const bool streams = streams_states(p);
  const MicroSteps steps{steps_per_token(p)};
  const bool whole_panels = last % kPanel == 0, v_in_place = p.v.stride[3] == 1 && whole_panels,
             o_in_place = p.o.stride[3] == 1 && whole_panels && steps.n == 1;
  float* const states = s.state;
  const std::int64_t state_floats = key_dim * round_up(p.shape.value_dim, kPanel);
  for (std::int64_t i_h = range.head; i_h < range.head_end; ++i_h) {
    load_state_panels(p.initial_state, first, last, key_dim, states + (i_h - range.head) * state_floats, range.n, i_h);
  }
  for (std::int64_t start = sequence.begin; start < sequence.end; start += kChunk) {
    for (std::int64_t i_h = range.head; i_h < range.head_end; ++i_h) {
      const ChunkPlace at(p.shape, sequence, i_h, start, steps);
      s.state = states + (i_h - range.head) * state_floats;
      load_tokens(p, at, s);
      store_chunk_state(s.state, p.chunk_states, streams, first, last, key_dim, at.i_b, sequence.chunk(start), i_h);
      const bool more_heads = i_h + 1 < range.head_end;
      const ChunkPlace next(p.shape, sequence, more_heads ? i_h + 1 : range.head, more_heads ? start : start + kChunk,
                            steps);
      plan_prefetches(p, next, first, last, s.prefetches);
      // If K is small, the sweeps prefetch only a part of the list.
      const std::int64_t pairs = (at.tokens + 1) / 2,
                         sweeps = (last - first + kTogether * kPanel - 1) / (kTogether * kPanel);
      const std::int64_t in_sweeps = pairs * sweeps * (key_dim / kRowsPerPrefetch),
                         slices = (last - first + width - 1) / width;
      const std::int64_t prefetch_count =
          std::max<std::int64_t>(0, s.prefetches.count() - in_sweeps + pairs * slices - 1) / (pairs * slices);
      ValueRows<T> values{reinterpret_cast<T*>(s.values), s.value_stride, reinterpret_cast<T*>(s.out), s.value_stride};
      if (v_in_place) {
        values.v = p.v.at(at.i_b, start, i_h);
        values.v_stride = p.v.stride[1];
      } else {
        copy_values(p.v, at, first, last, reinterpret_cast<T*>(s.values), s.value_stride);
      }
      if (o_in_place) {
        values.o = p.o.at(at.i_b, start, i_h);
        values.o_stride = p.o.stride[1];
      }
      for (std::int64_t v = first; v < last; v += width) {
        run_slice(s, at.tokens, key_dim, v, std::min(v + width, round_up(last, kPanel)), values, prefetch_count);
      }
      if (!o_in_place) copy_out(values, at, first, last, p.o);
    }
  }
  for (std::int64_t i_h = range.head; i_h < range.head_end; ++i_h) {
    store_state_panels(states + (i_h - range.head) * state_floats, p.final_state, first, last, key_dim, range.n, i_h);
  }
  if (streams) hwy::FlushStream();
}

void RecurrentFwdFloat(const DeltaForward<float>& p, const HeadRange& range, std::byte* memory) {
  RecurrentFwdRange(p, range, memory);
}

void RecurrentFwdBfloat16(const DeltaForward<bfloat16>& p, const HeadRange& range, std::byte* memory) {
  RecurrentFwdRange(p, range, memory);
}

std::int64_t RecurrentPanelWidth() { return kPanel; }

}  // namespace
}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu::EFLA_KEYS {
namespace {

HWY_EXPORT(RecurrentFwdFloat);
HWY_EXPORT(RecurrentFwdBfloat16);
HWY_EXPORT(FwdBytesPerWorker);
HWY_EXPORT(RecurrentPanelWidth);

void compute(const DeltaForward<float>& p, const HeadRange& range, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(RecurrentFwdFloat)(p, range, memory);
}
void compute(const DeltaForward<bfloat16>& p, const HeadRange& range, std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(RecurrentFwdBfloat16)(p, range, memory);
}

}  // namespace

std::size_t recurrent_fwd_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return HWY_DYNAMIC_DISPATCH(FwdBytesPerWorker)(shape, rule.decay, heads_per_block(shape, threads)) *
         static_cast<std::size_t>(threads);
}

template <class T>
void recurrent_fwd(const DeltaForward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t width = HWY_DYNAMIC_DISPATCH(RecurrentPanelWidth)();
  for_each_head_range(p.shape, (p.shape.value_dim + width - 1) / width, workspace, pool,
                      [&](const HeadRange& range, std::byte* memory) { compute(p, range, memory); });
}

template void recurrent_fwd(const DeltaForward<float>&, Workspace, ThreadPool&);
template void recurrent_fwd(const DeltaForward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu::EFLA_KEYS
#endif  // HWY_ONCE
