#include "efla/cpu/linear.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/linear.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "efla/cpu/common/element-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Computes a row of the weight with M rows of x. The weight is read in its order in memory, which the hardware
// prefetches. Each sum has kSums accumulators, because an addition waits for the previous one.
template <int M>
HWY_INLINE void dot_products(const LinearForward& p, std::int64_t m, std::int64_t n) {
  constexpr int kSums = 4;
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const std::size_t size = static_cast<std::size_t>(p.x.extent[1]), lanes = hn::Lanes(d);
  const float* weight = p.weight.at(n);
  const float* x[M];
  hn::Vec<decltype(d)> sum[M][kSums];
  for (int i = 0; i < M; ++i) {
    x[i] = p.x.at(m + i);
    for (int j = 0; j < kSums; ++j) sum[i][j] = hn::Zero(d);
  }
  std::size_t at = 0;
  for (; at + kSums * lanes <= size; at += kSums * lanes) {
    for (int j = 0; j < kSums; ++j) {
      const auto w = hn::LoadU(d, weight + at + j * lanes);
      for (int i = 0; i < M; ++i) sum[i][j] = hn::MulAdd(w, hn::LoadU(d, x[i] + at + j * lanes), sum[i][j]);
    }
  }
  for (int i = 0; i < M; ++i) {
    auto all = hn::Add(hn::Add(sum[i][0], sum[i][1]), hn::Add(sum[i][2], sum[i][3]));
    std::size_t c = at;
    for (; c + lanes <= size; c += lanes) all = hn::MulAdd(hn::LoadU(d, weight + c), hn::LoadU(d, x[i] + c), all);
    auto rest = hn::Set(d1, hn::GetLane(hn::SumOfLanes(d, all)));
    for (; c < size; ++c) rest = hn::MulAdd(hn::LoadU(d1, weight + c), hn::LoadU(d1, x[i] + c), rest);
    p.y(m + i, n) = hn::GetLane(rest);
  }
}

void linear_rows(const LinearForward& p, std::int64_t begin, std::int64_t end) {
  const std::int64_t rows = p.x.extent[0];
  for (std::int64_t n = begin; n < end; ++n) {
    std::int64_t m = 0;
    for (; m + 2 <= rows; m += 2) dot_products<2>(p, m, n);
    if (m < rows) dot_products<1>(p, m, n);
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {

HWY_EXPORT(linear_rows);

void linear(const LinearForward& p, ThreadPool& pool) {
  // A task must be long compared with its start, and the whole compared with waking a thread.
  constexpr std::int64_t kTaskFloats = 1 << 14, kLeastShared = 1 << 18;
  const std::int64_t rows = p.weight.extent[0], columns = std::max<std::int64_t>(1, p.weight.extent[1]);
  const bool shared = rows * columns >= kLeastShared;
  const std::int64_t step = shared ? std::max<std::int64_t>(1, kTaskFloats / columns) : std::max<std::int64_t>(1, rows);
  pool.run((rows + step - 1) / step, [&](std::int64_t task, int) {
    HWY_DYNAMIC_DISPATCH(linear_rows)(p, task * step, std::min(rows, (task + 1) * step));
  });
}

}  // namespace efla::cpu
#endif
