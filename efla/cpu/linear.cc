#include "efla/cpu/linear.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/linear.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "efla/cpu/element-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// M rows of x with N rows of the weight, a sum in a register each.
template <int M, int N>
HWY_INLINE void dot_products(const Linear& p, std::int64_t m, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const auto size = static_cast<std::size_t>(p.x.extent[1]);
  const float *x[M], *weight[N];
  hn::Vec<decltype(d)> sum[M][N];
  for (int i = 0; i < M; ++i) x[i] = p.x.at(m + i);
  for (int j = 0; j < N; ++j) weight[j] = p.weight.at(n + j);
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) sum[i][j] = hn::Zero(d);
  }
  std::size_t at = 0;
  for (; at + hn::Lanes(d) <= size; at += hn::Lanes(d)) {
    for (int j = 0; j < N; ++j) {
      const auto w = hn::LoadU(d, weight[j] + at);
      for (int i = 0; i < M; ++i) sum[i][j] = hn::MulAdd(w, hn::LoadU(d, x[i] + at), sum[i][j]);
    }
  }
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) {
      auto rest = hn::Set(d1, hn::GetLane(hn::SumOfLanes(d, sum[i][j])));
      for (std::size_t c = at; c < size; ++c) {
        rest = hn::MulAdd(hn::LoadU(d1, x[i] + c), hn::LoadU(d1, weight[j] + c), rest);
      }
      p.y(m + i, n + j) = hn::GetLane(rest);
    }
  }
}

template <int N>
HWY_INLINE void all_rows(const Linear& p, std::int64_t n) {
  constexpr int kMost = 4;
  const std::int64_t rows = p.x.extent[0];
  std::int64_t m = 0;
  for (; m + kMost <= rows; m += kMost) dot_products<kMost, N>(p, m, n);
  for (; m < rows; ++m) dot_products<1, N>(p, m, n);
}

void linear_rows(const Linear& p, std::int64_t begin, std::int64_t end) {
  constexpr int kTogether = 4;
  std::int64_t n = begin;
  for (; n + kTogether <= end; n += kTogether) {
    if (p.x.extent[0] == 1) {
      dot_products<1, kTogether>(p, 0, n);
    } else {
      all_rows<2>(p, n);
      all_rows<2>(p, n + 2);
    }
  }
  for (; n < end; ++n) all_rows<1>(p, n);
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {

HWY_EXPORT(linear_rows);

void linear(const Linear& p, ThreadPool& pool) {
  constexpr std::int64_t kTaskFloats = 16384;  // long beside a task's start
  const std::int64_t rows = p.weight.extent[0];
  const std::int64_t step = std::max<std::int64_t>(4, kTaskFloats / std::max<std::int64_t>(1, p.weight.extent[1]));
  pool.run((rows + step - 1) / step, [&](std::int64_t task, int) {
    HWY_DYNAMIC_DISPATCH(linear_rows)(p, task * step, std::min(rows, (task + 1) * step));
  });
}

}  // namespace efla::cpu
#endif
