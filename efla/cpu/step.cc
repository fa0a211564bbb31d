// The decode step: one token of the recurrence, the state streamed through the core once for reading and once for
// writing.
#include "efla/cpu/delta.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/step.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h files

#include "efla/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Value columns of a task: a slice of a state [K, kStepColumns] of a head of 128 stays in the first-level cache between
// the sweep that reads it (Sᵀk and Sᵀq together) and the one that updates it.
constexpr std::int64_t kStepColumns = 64;

struct StepScratch {
  std::int64_t key_stride = 0;
  float* q = nullptr;      // [Kp]
  float* k = nullptr;      // [Kp]
  float* v = nullptr;      // [kStepColumns]
  float* error = nullptr;  // [kStepColumns] Sᵀk, then u
  float* out = nullptr;    // [kStepColumns] Sᵀq

  void lay_out(Arena& arena, const DeltaShape& shape) {
    key_stride = round_up(shape.key_dim, kLanes);
    for (float** row : {&q, &k}) *row = arena.floats(key_stride);
    for (float** row : {&v, &error, &out}) *row = arena.floats(kStepColumns);
  }
};

std::size_t StepBytesPerWorker(const DeltaShape& shape) {
  Arena arena;
  StepScratch().lay_out(arena, shape);
  return arena.bytes();
}

// error = Sᵀk and out = Sᵀq over N vectors of columns.
template <int N>
HWY_INLINE void read_columns(const float* HWY_RESTRICT state, std::int64_t row_stride, std::int64_t key_dim,
                             StepScratch& s, std::int64_t column) {
  const FloatTag d;
  FloatVec error[N], out[N];
  unroll<N>([&](auto n) EFLA_UNROLLED { error[n] = out[n] = hn::Zero(d); });
  for (std::int64_t i = 0; i < key_dim; ++i) {
    const FloatVec k = hn::Set(d, s.k[i]);
    const FloatVec q = hn::Set(d, s.q[i]);
    const float* row = state + i * row_stride + column;
    unroll<N>([&](auto n) EFLA_UNROLLED {
      const FloatVec x = hn::LoadU(d, row + n * kLanes);
      error[n] = hn::MulAdd(k, x, error[n]);
      out[n] = hn::MulAdd(q, x, out[n]);
    });
  }
  unroll<N>([&](auto n) EFLA_UNROLLED {
    hn::Store(error[n], d, s.error + column + n * kLanes);
    hn::Store(out[n], d, s.out + column + n * kLanes);
  });
}

// S += k uᵀ over N vectors of columns.
template <int N>
HWY_INLINE void write_columns(float* HWY_RESTRICT state, std::int64_t row_stride, std::int64_t key_dim,
                              const StepScratch& s, std::int64_t column) {
  const FloatTag d;
  FloatVec u[N];
  unroll<N>([&](auto n) EFLA_UNROLLED { u[n] = hn::Load(d, s.error + column + n * kLanes); });
  for (std::int64_t i = 0; i < key_dim; ++i) {
    const FloatVec k = hn::Set(d, s.k[i]);
    float* row = state + i * row_stride + column;
    unroll<N>([&](auto n) EFLA_UNROLLED {
      hn::StoreU(hn::MulAdd(k, u[n], hn::LoadU(d, row + n * kLanes)), d, row + n * kLanes);
    });
  }
}

// Columns of a state whose last stride is 1; any others, and the last few, one by one.
HWY_INLINE void read_state(const View<float, 4>& state, std::int64_t i_b, std::int64_t i_h, std::int64_t first,
                           std::int64_t count, std::int64_t key_dim, StepScratch& s) {
  const float* base = state.at(i_b, i_h, std::int64_t{0}, first);
  std::int64_t j = 0;
  if (state.stride[3] == 1) {
    for (; j + 4 * kLanes <= count; j += 4 * kLanes) read_columns<4>(base, state.stride[2], key_dim, s, j);
    for (; j + kLanes <= count; j += kLanes) read_columns<1>(base, state.stride[2], key_dim, s, j);
  }
  for (; j < count; ++j) {
    float error = 0.0F, out = 0.0F;
    for (std::int64_t i = 0; i < key_dim; ++i) {
      const float x = base[i * state.stride[2] + j * state.stride[3]];
      error += s.k[i] * x;
      out += s.q[i] * x;
    }
    s.error[j] = error;
    s.out[j] = out;
  }
}

HWY_INLINE void write_state(const View<float, 4>& state, std::int64_t i_b, std::int64_t i_h, std::int64_t first,
                            std::int64_t count, std::int64_t key_dim, const StepScratch& s) {
  float* base = state.at(i_b, i_h, std::int64_t{0}, first);
  std::int64_t j = 0;
  if (state.stride[3] == 1) {
    for (; j + 4 * kLanes <= count; j += 4 * kLanes) write_columns<4>(base, state.stride[2], key_dim, s, j);
    for (; j + kLanes <= count; j += kLanes) write_columns<1>(base, state.stride[2], key_dim, s, j);
  }
  for (; j < count; ++j) {
    for (std::int64_t i = 0; i < key_dim; ++i) base[i * state.stride[2] + j * state.stride[3]] += s.k[i] * s.error[j];
  }
}

// Columns [first, first + count) of one head. With r = Sᵀq before the token, o = scale · (r + (q·k) u): the updated
// state need not be read again.
template <class T>
HWY_INLINE void step_columns(const DeltaStep<T>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t first,
                             std::int64_t count, std::byte* memory) {
  Arena arena(memory);
  StepScratch s;
  s.lay_out(arena, p.shape);
  const std::int64_t key_dim = p.shape.key_dim;
  load_row(p.q.at(i_b, i_h), p.q.stride[2], key_dim, s.key_stride, s.q);
  load_row(p.k.at(i_b, i_h), p.k.stride[2], key_dim, s.key_stride, s.k);
  load_row(p.v.at(i_b, i_h, first), p.v.stride[2], count, kStepColumns, s.v);
  if (p.rule.qk_l2norm) {
    l2_normalise(s.q, s.key_stride);
    l2_normalise(s.k, s.key_stride);
  }
  const float alpha = gain_alpha(p.rule.step, to_float(p.beta(i_b, i_h)), dot(s.k, s.k, s.key_stride));
  const float a = static_cast<float>(p.rule.step.erase_scale) * alpha;
  const float b = static_cast<float>(p.rule.step.write_scale) * alpha;
  const float q_dot_k = dot(s.q, s.k, s.key_stride);
  read_state(p.state, i_b, i_h, first, count, key_dim, s);
  for (std::int64_t j = 0; j < count; ++j) {
    s.error[j] = b * s.v[j] - a * s.error[j];
    s.out[j] += q_dot_k * s.error[j];
  }
  write_state(p.state, i_b, i_h, first, count, key_dim, s);
  store_row(s.out, static_cast<float>(p.rule.scale_for(key_dim)), count, p.o.at(i_b, i_h, first), p.o.stride[2]);
}

void StepFloat(const DeltaStep<float>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t first, std::int64_t count,
               std::byte* memory) {
  step_columns(p, i_b, i_h, first, count, memory);
}

void StepBfloat16(const DeltaStep<bfloat16>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t first,
                  std::int64_t count, std::byte* memory) {
  step_columns(p, i_b, i_h, first, count, memory);
}

std::int64_t StepColumns() { return kStepColumns; }

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(StepFloat);
HWY_EXPORT(StepBfloat16);
HWY_EXPORT(StepBytesPerWorker);
HWY_EXPORT(StepColumns);

void columns(const DeltaStep<float>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t first, std::int64_t count,
             std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(StepFloat)(p, i_b, i_h, first, count, memory);
}
void columns(const DeltaStep<bfloat16>& p, std::int64_t i_b, std::int64_t i_h, std::int64_t first, std::int64_t count,
             std::byte* memory) {
  HWY_DYNAMIC_DISPATCH(StepBfloat16)(p, i_b, i_h, first, count, memory);
}

}  // namespace

std::size_t step_workspace_bytes(const DeltaShape& shape, int threads) {
  return HWY_DYNAMIC_DISPATCH(StepBytesPerWorker)(shape) * static_cast<std::size_t>(threads);
}

template <class T>
void step(const DeltaStep<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t width = HWY_DYNAMIC_DISPATCH(StepColumns)();
  const std::int64_t slices = (p.shape.value_dim + width - 1) / width;
  const std::int64_t tasks = p.shape.batch * p.shape.heads * slices;
  const std::size_t bytes = workspace.bytes / static_cast<std::size_t>(pool.threads());
  // A task is a few microseconds: each thread takes one run of them.
  const std::int64_t runs = std::min<std::int64_t>(tasks, pool.threads());
  pool.run(runs, [&](std::int64_t run, int worker) {
    for (std::int64_t task = tasks * run / runs; task < tasks * (run + 1) / runs; ++task) {
      const std::int64_t head = task / slices, first = task % slices * width;
      columns(p, head / p.shape.heads, head % p.shape.heads, first, std::min(width, p.shape.value_dim - first),
              workspace.data + bytes * static_cast<std::size_t>(worker));
    }
  });
}

template void step(const DeltaStep<float>&, Workspace, ThreadPool&);
template void step(const DeltaStep<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif  // HWY_ONCE
