// The product of rows of x with a weight, on vector units (docs/ops/linear.md). A task has a block of outputs: some
// rows of x by some rows of the weight. Few rows of x are computed together with the same rows of the weight, so that
// the weight is read from memory once. Rows of quantised blocks are written as rows of numbers, a few at a time, and
// these are multiplied.
#include "efla/cpu/linear.h"

#include <algorithm>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "efla/cpu/common/target.h"
#include "efla/cpu/common/workspace.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/linear.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "efla/cpu/linear_blocks-inl.h"
#include "efla/cpu/linear_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

template <class W>
void linear_block(const LinearForward& p, const View<const W, 2>& weight, const LinearBlock& block, bool stream) {
  constexpr bool kScaled = std::is_same_v<W, std::int8_t>;
  all_tiles<kScaled>(LinearRows<float>{p.x, p.y}, block,
                     WeightRows<W>{weight, kScaled ? p.scales : View<const float, 2>{}, true, stream});
}

void linear_block_f32(const LinearForward& p, const LinearBlock& block, bool stream) {
  linear_block(p, p.weight, block, stream);
}
void linear_block_bf16(const LinearForward& p, const LinearBlock& block, bool stream) {
  linear_block(p, p.narrow_weight, block, stream);
}
void linear_block_int8(const LinearForward& p, const LinearBlock& block, bool stream) {
  linear_block(p, p.byte_weight, block, stream);
}

#if HWY_TARGET == HWY_AVX3
// Computes a block with x rounded to bfloat16. Needs uses_bfloat16() of common/target.h.
void linear_block_pairs(const LinearRows<bfloat16>& p, const View<const bfloat16, 2>& weight, const LinearBlock& block,
                        bool stream) {
  all_tiles<false>(p, block, WeightRows<bfloat16>{weight, {}, true, stream});
}
#endif

// Computes a block with a quantised weight, whose numbers get the type of x. `room` is for the numbers of room_for(…)
// rows. bfloat16 needs uses_bfloat16() of common/target.h.
template <class X>
void linear_block_quantised(const LinearRows<X>& p, const QuantMatrix& weight, const LinearBlock& block, X* room) {
  const std::int64_t step = room_for(block);
  for (std::int64_t n = block.n_begin; n < block.n_end; n += step) {
    const std::int64_t count = std::min(step, block.n_end - n);
    write_rows(weight, n, n + count, room);
    LinearRows<X> part = p;
    part.y.data += n * p.y.stride[1];
    const auto rows = View<const X, 2>::contiguous(room, {count, weight.columns});
    all_tiles<false>(part, {block.m_begin, block.m_end, 0, count}, WeightRows<X>{rows, {}, false, false});
  }
}

void linear_block_wide(const LinearForward& p, const LinearBlock& block, float* room) {
  linear_block_quantised<float>({p.x, p.y}, p.quant_weight, block, room);
}
#if HWY_TARGET == HWY_AVX3
void linear_block_narrow(const LinearRows<bfloat16>& p, const QuantMatrix& weight, const LinearBlock& block,
                         bfloat16* room) {
  linear_block_quantised(p, weight, block, room);
}
#endif

// Rounds row m of x to bfloat16.
void round_row(const View<const float, 2>& x, std::int64_t m, bfloat16* to) {
  const float* from = x.at(m);
  for_each_vector(static_cast<std::size_t>(x.extent[1]),
                  [&](auto d, std::size_t c) HWY_ATTR { store(d, hn::LoadU(d, from + c), to + c); });
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {

HWY_EXPORT(linear_block_f32);
HWY_EXPORT(linear_block_bf16);
HWY_EXPORT(linear_block_int8);
HWY_EXPORT(linear_block_wide);
HWY_EXPORT(round_row);

namespace {

// How the outputs of a problem are cut into tasks.
struct LinearCut {
  std::int64_t m_step, n_step, m_blocks, tasks;
};

// What all problems of a call decide together. few_floats: elements of the weight per task if there are few rows of x;
// 0: the whole weight. stream: whether the weights have kStreamBytes.
struct LinearPlan {
  std::int64_t few_floats;
  bool stream;
};

std::int64_t columns_of(const LinearForward& p) { return std::max<std::int64_t>(1, p.x.extent[1]); }

// Returns the bytes of an element of the weight.
std::int64_t element_bytes(const LinearForward& p) {
  return p.narrow_weight ? sizeof(bfloat16) : p.byte_weight ? sizeof(std::int8_t) : sizeof(float);
}

// Returns how a problem is cut into tasks. Many rows of x are cut so that a block of the weight stays in the
// second-level cache while all rows are multiplied by it.
LinearCut cut_of(const LinearForward& p, const LinearPlan& plan) {
  // Many rows share the numbers of a quantised weight, which each task writes.
  constexpr std::int64_t kFewRows = 16, kRowsPerTask = 64, kQuantRowsPerTask = 256, kManyFloats = 1 << 16;
  constexpr std::int64_t kTile = 24;  // a multiple of the number of weight rows of most tiles
  const std::int64_t rows = p.x.extent[0], outputs = p.outputs();
  if (rows == 0 || outputs == 0) return {};
  const bool few = rows <= kFewRows;
  const std::int64_t floats = few ? plan.few_floats : kManyFloats;
  const std::int64_t n_step = floats == 0 ? outputs : std::max(kTile, floats / columns_of(p) / kTile * kTile);
  const std::int64_t m_step = few ? rows : p.quant_weight ? kQuantRowsPerTask : kRowsPerTask;
  const std::int64_t m_blocks = (rows + m_step - 1) / m_step;
  return {m_step, n_step, m_blocks, (outputs + n_step - 1) / n_step * m_blocks};
}

// Elements in memory that only grows, aligned to a cache line and with undefined values.
template <class T>
class GrowingArray {
 public:
  T* reserve(std::int64_t count) {
    const auto size = static_cast<std::size_t>(count);
    if (size > size_) {
      elements_.reset(new (std::align_val_t(kAlignment)) T[size]);
      size_ = size;  // last: without memory the old size stays true
    }
    return elements_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete[](p, std::align_val_t(kAlignment)); }
  };
  std::size_t size_ = 0;
  std::unique_ptr<T[], Free> elements_;
};

// Rows of x rounded to bfloat16.
class RoundedRows {
 public:
  // Rounds the x of the problems that allow it; the views of the others are empty. The views live until the next call.
  std::vector<View<const bfloat16, 2>> round(std::span<const LinearForward> problems, ThreadPool& pool) {
    std::vector<View<const bfloat16, 2>> views(problems.size());
    if (!uses_bfloat16()) return views;
    std::int64_t size = 0;
    for (std::size_t i = 0; i < problems.size(); ++i) {
      if (!is_rounded(problems[i]) || is_same_x(problems, i)) continue;
      size += problems[i].x.extent[0] * stride_of(problems[i]);
    }
    bfloat16* next = numbers_.reserve(size);
    for (std::size_t i = 0; i < problems.size(); ++i) {
      const LinearForward& p = problems[i];
      if (!is_rounded(p)) continue;
      if (is_same_x(problems, i)) {
        views[i] = views[i - 1];
        continue;
      }
      const View<bfloat16, 2> view{next, p.x.extent, {stride_of(p), 1}};
      round_all(p.x, view, pool);
      views[i] = view;
      next += view.extent[0] * view.stride[0];
    }
    return views;
  }

 private:
  static constexpr std::int64_t kLineElements = kAlignment / sizeof(bfloat16);
  static bool is_rounded(const LinearForward& p) { return p.rounds_x && (p.narrow_weight || p.quant_weight); }
  static std::int64_t stride_of(const LinearForward& p) {
    return (p.x.extent[1] + kLineElements - 1) / kLineElements * kLineElements;
  }
  // Returns whether the problem before this one has the same x, rounded.
  static bool is_same_x(std::span<const LinearForward> problems, std::size_t i) {
    if (i == 0 || !is_rounded(problems[i - 1])) return false;
    const auto &x = problems[i].x, &before = problems[i - 1].x;
    return x.data == before.data && x.extent == before.extent && x.stride == before.stride;
  }
  static void round_all(const View<const float, 2>& x, const View<bfloat16, 2>& to, ThreadPool& pool) {
    constexpr std::int64_t kLeastShared = 1 << 16;
    const auto round = [&](std::int64_t m, int) { HWY_DYNAMIC_DISPATCH(round_row)(x, m, to.at(m)); };
    if (x.size() >= kLeastShared) return pool.run(x.extent[0], round);
    for (std::int64_t m = 0; m < x.extent[0]; ++m) round(m, 0);
  }

  GrowingArray<bfloat16> numbers_;
};

// Computes a block with x in bfloat16.
void run_rounded([[maybe_unused]] const LinearRows<bfloat16>& rows, [[maybe_unused]] const LinearForward& p,
                 [[maybe_unused]] const LinearBlock& block, [[maybe_unused]] bool stream) {
#if HWY_TARGETS & HWY_AVX3
  if (p.narrow_weight) return N_AVX3::linear_block_pairs(rows, p.narrow_weight, block, stream);
  thread_local GrowingArray<bfloat16> room;
  bfloat16* const numbers = room.reserve(room_for(block) * p.quant_weight.columns);
  N_AVX3::linear_block_narrow(rows, p.quant_weight, block, numbers);
#endif
}

// x: the problem's x in bfloat16, or empty.
void run_task(const LinearForward& p, const View<const bfloat16, 2>& x, const LinearCut& cut, bool stream,
              std::int64_t task) {
  const std::int64_t m = task % cut.m_blocks * cut.m_step, n = task / cut.m_blocks * cut.n_step;
  const LinearBlock block{m, std::min(p.x.extent[0], m + cut.m_step), n, std::min(p.outputs(), n + cut.n_step)};
  if (x) {
    run_rounded({x, p.y}, p, block, stream);
  } else if (p.quant_weight) {
    thread_local GrowingArray<float> room;
    float* const numbers = room.reserve(room_for(block) * p.quant_weight.columns);
    HWY_DYNAMIC_DISPATCH(linear_block_wide)(p, block, numbers);
  } else if (p.narrow_weight) {
    HWY_DYNAMIC_DISPATCH(linear_block_bf16)(p, block, stream);
  } else if (p.byte_weight) {
    HWY_DYNAMIC_DISPATCH(linear_block_int8)(p, block, stream);
  } else {
    HWY_DYNAMIC_DISPATCH(linear_block_f32)(p, block, stream);
  }
}

}  // namespace

void linear(std::span<const LinearForward> problems, ThreadPool& pool) {
  // Distributed work must be long compared with waking a thread, and a task long compared with its start. Each thread
  // has several tasks, so that other threads can take some of them if the thread is late.
  constexpr std::int64_t kLeastShared = 1 << 18, kLeastSharedAwake = 1 << 16;
  constexpr std::int64_t kLeastFloats = 1 << 14, kMostFloats = 1 << 15, kTasksPerThread = 4;
  std::int64_t products = 0, floats = 0, bytes = 0, tasks = 0;
  for (const auto& p : problems) {
    floats += p.outputs() * columns_of(p);
    products += p.x.extent[0] * p.outputs() * columns_of(p);
    bytes += p.outputs() * columns_of(p) * element_bytes(p);
  }
  const bool shared = products >= (pool.in_use() ? kLeastSharedAwake : kLeastShared);
  const LinearPlan plan{shared ? std::clamp(floats / (kTasksPerThread * pool.threads()), kLeastFloats, kMostFloats) : 0,
                        bytes >= kStreamBytes};
  for (const auto& p : problems) tasks += cut_of(p, plan).tasks;
  thread_local RoundedRows rounded;
  const auto rounded_x = rounded.round(problems, pool);
  const auto run = [&](std::int64_t task) {
    std::size_t i = 0;
    LinearCut cut = cut_of(problems[i], plan);
    for (; task >= cut.tasks; cut = cut_of(problems[++i], plan)) task -= cut.tasks;
    run_task(problems[i], rounded_x[i], cut, plan.stream, task);
  };
  if (shared) return pool.run(tasks, [&](std::int64_t task, int) { run(task); });
  pool.run(1, [&](std::int64_t, int) {
    for (std::int64_t task = 0; task < tasks; ++task) run(task);
  });
}

}  // namespace efla::cpu
#endif
