// The decode step: one token of the recurrence (docs/ops/delta_rule_step.md). The first pass over a state computes S̃ᵀκ
// (κ is k, or the second key) and S̃ᵀq, the second pass reads and writes the state for the update. A task has slices of
// value columns of one or more heads.
#include "efla/cpu/delta/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/delta/step.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/delta/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {
namespace {

// Value columns per slice. Slices let several threads work on a few large heads.
constexpr std::int64_t kStepColumns = 128;

std::int64_t step_slices(const DeltaShape& shape) { return (shape.value_dim + kStepColumns - 1) / kStepColumns; }

struct StepScratch {
  std::int64_t key_stride = 0;
  float erase = 0.0F, write = 0.0F;  // a and b
  float q_dot_k = 0.0F;
  float* q = nullptr;       // [Kp]
  float* k = nullptr;       // [Kp]
  float* decay = nullptr;   // [Kp] e^g; allocated only if the rule has a decay
  float* q_read = nullptr;  // [Kp] q ⊙ e^g, or q
  float* k_read = nullptr;  // [Kp] the erase key ⊙ e^g, or the erase key
  float* v = nullptr;       // [kStepColumns]
  float* error = nullptr;   // [kStepColumns] S̃ᵀκ, then u
  float* out = nullptr;     // [kStepColumns] S̃ᵀq, then o without the scale

  void lay_out(Arena& arena, const DeltaShape& shape, Decay kind) {
    key_stride = round_up(shape.key_dim, kLanes);
    for (float** row : {&q, &k}) *row = arena.floats((kTwoKeys ? 2 : 1) * key_stride);
    q_read = q;
    k_read = erase_key();
    if (kind != Decay::none) {
      for (float** row : {&decay, &q_read, &k_read}) *row = arena.floats(key_stride);
    }
    for (float** row : {&v, &error, &out}) *row = arena.floats(kStepColumns);
  }

  // Returns the erase key [Kp], times the factor of the L2 norm: κ, which follows k, or k itself.
  float* erase_key() const { return kTwoKeys ? k + key_stride : k; }
};

std::size_t StepBytesPerWorker(const DeltaShape& shape, Decay decay) {
  Arena arena;
  StepScratch().lay_out(arena, shape, decay);
  return arena.bytes();
}

// Computes error = S̃ᵀκ and out = S̃ᵀq over N vectors of columns. S̃ is never stored: k_read and q_read hold the decays.
template <int N, class S>
HWY_INLINE void read_columns(const S* HWY_RESTRICT state, std::int64_t row_stride, std::int64_t key_dim, StepScratch& s,
                             std::int64_t column) {
  const FloatTag d;
  const float* k_read = s.k_read;  // a local copy, because pointers in s are loaded again after every fence
  const float* q_read = s.q_read;
  FloatVec error[N], out[N];
  unroll<N>([&](auto n) EFLA_UNROLLED { error[n] = out[n] = hn::Zero(d); });
  for (std::int64_t i = 0; i < key_dim; ++i) {
    const FloatVec k = hn::Set(d, k_read[i]);
    const FloatVec q = hn::Set(d, q_read[i]);
    const S* row = state + i * row_stride + column;
    FloatVec x[N];
    unroll<N>([&](auto n) EFLA_UNROLLED { x[n] = load(d, row + n * kLanes); });
    HWY_FENCE;  // without it GCC makes x an operand of both sums and loads it twice, which is slower
    unroll<N>([&](auto n) EFLA_UNROLLED {
      error[n] = hn::MulAdd(k, x[n], error[n]);
      out[n] = hn::MulAdd(q, x[n], out[n]);
    });
  }
  unroll<N>([&](auto n) EFLA_UNROLLED {
    hn::Store(error[n], d, s.error + column + n * kLanes);
    hn::Store(out[n], d, s.out + column + n * kLanes);
  });
}

// Computes S ← D S + k uᵀ over N vectors of columns. Starts with the last row, because the rows that were read last are
// still in the first-level cache. The build does not let the compiler fuse the product and the sum, because on Zen 3 a
// fused multiply-add beside a store is slower.
template <int N, bool kDecays, class S>
HWY_INLINE void write_columns(S* HWY_RESTRICT state, std::int64_t row_stride, std::int64_t key_dim,
                              const StepScratch& s, std::int64_t column) {
  const FloatTag d;
  FloatVec u[N];
  unroll<N>([&](auto n) EFLA_UNROLLED { u[n] = hn::Load(d, s.error + column + n * kLanes); });
  for (std::int64_t i = key_dim; i-- > 0;) {
    const FloatVec k = hn::Set(d, s.k[i]);
    [[maybe_unused]] const FloatVec decay = hn::Set(d, kDecays ? s.decay[i] : 1.0F);
    S* row = state + i * row_stride + column;
    unroll<N>([&](auto n) EFLA_UNROLLED {
      FloatVec x = load(d, row + n * kLanes);
      if constexpr (kDecays) x = hn::Mul(decay, x);
      store(d, hn::Add(hn::Mul(k, u[n]), x), row + n * kLanes);
    });
  }
}

// Computes error and out of `count` columns from column `first` on. If the last stride is 1, most columns are computed
// in vectors. The others are computed one by one.
template <class S>
HWY_INLINE void read_state(const View<S, 4>& state, std::int64_t slot, std::int64_t i_h, std::int64_t first,
                           std::int64_t count, std::int64_t key_dim, StepScratch& s) {
  const S* base = state.at(slot, i_h, std::int64_t{0}, first);
  std::int64_t j = 0;
  if (state.stride[3] == 1) {
    for (; j + 4 * kLanes <= count; j += 4 * kLanes) read_columns<4>(base, state.stride[2], key_dim, s, j);
    for (; j + kLanes <= count; j += kLanes) read_columns<1>(base, state.stride[2], key_dim, s, j);
  }
  for (; j < count; ++j) {
    float error = 0.0F, out = 0.0F;
    for (std::int64_t i = 0; i < key_dim; ++i) {
      const float x = to_float(base[i * state.stride[2] + j * state.stride[3]]);
      error += s.k_read[i] * x;
      out += s.q_read[i] * x;
    }
    s.error[j] = error;
    s.out[j] = out;
  }
}

// Updates the same columns of the state, with u in error.
template <bool kDecays, class S>
HWY_INLINE void write_state(const View<S, 4>& state, std::int64_t slot, std::int64_t i_h, std::int64_t first,
                            std::int64_t count, std::int64_t key_dim, const StepScratch& s) {
  S* base = state.at(slot, i_h, std::int64_t{0}, first);
  std::int64_t j = 0;
  if (state.stride[3] == 1) {
    for (; j + 8 * kLanes <= count; j += 8 * kLanes) write_columns<8, kDecays>(base, state.stride[2], key_dim, s, j);
    for (; j + 4 * kLanes <= count; j += 4 * kLanes) write_columns<4, kDecays>(base, state.stride[2], key_dim, s, j);
    for (; j + kLanes <= count; j += kLanes) write_columns<1, kDecays>(base, state.stride[2], key_dim, s, j);
  }
  for (; j < count; ++j) {
    for (std::int64_t i = 0; i < key_dim; ++i) {
      S& x = base[i * state.stride[2] + j * state.stride[3]];
      x = from_state<S>((kDecays ? s.decay[i] : 1.0F) * to_float(x) + s.k[i] * s.error[j]);
    }
  }
}

// Computes e^g, and q and the erase key times e^g.
template <class Problem>
HWY_INLINE void load_decays(const Problem& p, std::int64_t i_b, std::int64_t i_h, StepScratch& s) {
  const std::int64_t n = s.key_stride;
  const float* g = p.g.at(i_b, i_h);
  if (p.rule.decay == Decay::scalar) {
    std::fill_n(s.decay, n, std::exp(*g));
  } else {
    load_row(g, p.g.stride[2], p.shape.key_dim, n, s.decay);
    exponentials(s.decay, n);
  }
  multiply_rows(s.q, s.decay, n, s.q_read);
  multiply_rows(s.erase_key(), s.decay, n, s.k_read);
}

// Loads the token's q, keys and gains of one head.
template <class T, class S>
HWY_INLINE void load_keys(const DeltaStep<T, S>& p, std::int64_t i_b, std::int64_t i_h, StepScratch& s) {
  const std::int64_t key_dim = p.shape.key_dim, i_q = i_h / p.shape.group();
  load_row(p.q.at(i_b, i_q), p.q.stride[2], key_dim, s.key_stride, s.q);
  load_row(p.k.at(i_b, i_q), p.k.stride[2], key_dim, s.key_stride, s.k);
  if constexpr (kTwoKeys) {
    load_row(p.erase_key.at(i_b, i_q), p.erase_key.stride[2], key_dim, s.key_stride, s.erase_key());
  }
  if (p.rule.qk_l2norm) {
    l2_normalise(s.q, s.key_stride);
    const float factor = l2_normalise(s.k, s.key_stride);
    if constexpr (kTwoKeys) scale_row(s.erase_key(), factor, s.key_stride);
  }
  if (p.rule.decay != Decay::none) load_decays(p, i_b, i_h, s);
  float alpha = 0.0F;  // not by alpha_of, with which the code for one key would have other instructions
  if constexpr (kTwoKeys) {
    alpha = two_key_alpha(p.rule.step, to_float(p.beta(i_b, i_h)), dot(s.erase_key(), s.k, s.key_stride));
  } else {
    alpha = gain_alpha(p.rule.step, to_float(p.beta(i_b, i_h)), dot(s.k, s.k, s.key_stride));
  }
  s.erase = static_cast<float>(p.rule.step.erase_scale) * alpha;
  s.write = static_cast<float>(p.rule.step.write_scale) * alpha;
  s.q_dot_k = dot(s.q, s.k, s.key_stride);
}

// Computes columns [first, first + count) of one head. With r = S̃ᵀq, o = scale · (r + (q·k) u), so that the updated
// state need not be read.
template <class T, class S>
HWY_INLINE void step_columns(const DeltaStep<T, S>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t first,
                             std::int64_t count, float scale, StepScratch& s) {
  const FloatTag d;
  const std::int64_t key_dim = p.shape.key_dim, slot = p.slot(i_b);
  if (slot < 0) {
    std::fill_n(s.out, count, 0.0F);
    return store_row(s.out, scale, count, p.o.at(i_b, i_h, first), p.o.stride[2]);
  }
  load_row(p.v.at(i_b, i_h, first), p.v.stride[2], count, round_up(count, kLanes), s.v);
  read_state(p.state, slot, i_h, first, count, key_dim, s);
  const FloatVec a = hn::Set(d, s.erase), b = hn::Set(d, s.write), q_dot_k = hn::Set(d, s.q_dot_k);
  for (std::int64_t j = 0; j < count; j += kLanes) {
    const FloatVec u = hn::NegMulAdd(a, hn::Load(d, s.error + j), hn::Mul(b, hn::Load(d, s.v + j)));
    hn::Store(u, d, s.error + j);
    hn::Store(hn::MulAdd(q_dot_k, u, hn::Load(d, s.out + j)), d, s.out + j);
  }
  if (p.rule.decay != Decay::none) {
    write_state<true>(p.state, slot, i_h, first, count, key_dim, s);
  } else {
    write_state<false>(p.state, slot, i_h, first, count, key_dim, s);
  }
  store_row(s.out, scale, count, p.o.at(i_b, i_h, first), p.o.stride[2]);
}

// Computes slices [begin, end) of columns, numbered head after head.
template <class T, class S>
HWY_INLINE void step_tasks(const DeltaStep<T, S>& p, std::int64_t begin, std::int64_t end, std::byte* memory) {
  Arena arena(memory);
  StepScratch s;
  s.lay_out(arena, p.shape, p.rule.decay);
  const float scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  const std::int64_t slices = step_slices(p.shape);
  for (std::int64_t task = begin; task < end; ++task) {
    const std::int64_t head = task / slices, first = task % slices * kStepColumns;
    const std::int64_t i_b = head / p.shape.value_heads, i_h = head % p.shape.value_heads;
    if (task == begin || first == 0) load_keys(p, i_b, i_h, s);
    step_columns(p, i_b, i_h, first, std::min(kStepColumns, p.shape.value_dim - first), scale, s);
  }
}

// Instantiates Name for the element types T of the inputs and S of the state.
#define EFLA_FOR_TYPES(Name, T, S)                                                                     \
  void Step##Name(const DeltaStep<T, S>& p, std::int64_t begin, std::int64_t end, std::byte* memory) { \
    step_tasks(p, begin, end, memory);                                                                 \
  }
EFLA_FOR_TYPES(FloatFloat, float, float)
EFLA_FOR_TYPES(FloatBfloat16, float, bfloat16)
EFLA_FOR_TYPES(Bfloat16Float, bfloat16, float)
EFLA_FOR_TYPES(Bfloat16Bfloat16, bfloat16, bfloat16)
#undef EFLA_FOR_TYPES

std::int64_t StepSlices(const DeltaShape& shape) { return step_slices(shape); }

}  // namespace
}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu::EFLA_KEYS {
namespace {

// Least number of state elements per task if the pool's threads are awake, and if they must be woken. Waking a thread
// often takes longer than the work on a few heads.
constexpr std::int64_t kAwakeElements = 1 << 15, kAsleepElements = 1 << 16;

HWY_EXPORT(StepBytesPerWorker);
HWY_EXPORT(StepSlices);

#define EFLA_FOR_TYPES(Name, T, S)                                                                \
  HWY_EXPORT(Step##Name);                                                                         \
  void tasks(const DeltaStep<T, S>& p, std::int64_t begin, std::int64_t end, std::byte* memory) { \
    HWY_DYNAMIC_DISPATCH(Step##Name)(p, begin, end, memory);                                      \
  }
EFLA_FOR_TYPES(FloatFloat, float, float)
EFLA_FOR_TYPES(FloatBfloat16, float, bfloat16)
EFLA_FOR_TYPES(Bfloat16Float, bfloat16, float)
EFLA_FOR_TYPES(Bfloat16Bfloat16, bfloat16, bfloat16)
#undef EFLA_FOR_TYPES

}  // namespace

std::size_t step_workspace_bytes(const DeltaShape& shape, const DeltaRule& rule, int threads) {
  return HWY_DYNAMIC_DISPATCH(StepBytesPerWorker)(shape, rule.decay) * static_cast<std::size_t>(threads);
}

template <class T, class S>
void step(const DeltaStep<T, S>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t count = p.shape.batch * p.shape.value_heads * HWY_DYNAMIC_DISPATCH(StepSlices)(p.shape);
  const std::int64_t run_elements = pool.in_use() ? kAwakeElements : kAsleepElements;
  const std::int64_t elements = p.shape.batch * p.shape.value_heads * p.shape.key_dim * p.shape.value_dim;
  const std::int64_t runs = std::clamp<std::int64_t>(elements / run_elements, 1, count);
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(pool.threads());
  pool.run(runs, [&](std::int64_t run, int worker) {
    tasks(p, count * run / runs, count * (run + 1) / runs, workspace.data + bytes * static_cast<std::size_t>(worker));
  });
}

template void step(const DeltaStep<float, float>&, Workspace, ThreadPool&);
template void step(const DeltaStep<float, bfloat16>&, Workspace, ThreadPool&);
template void step(const DeltaStep<bfloat16, float>&, Workspace, ThreadPool&);
template void step(const DeltaStep<bfloat16, bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu::EFLA_KEYS
#endif  // HWY_ONCE
