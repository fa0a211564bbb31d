// Root-mean-square normalisation on vector units, forward and backward (docs/ops/rms_norm.md). A task has consecutive
// rows; their number depends only on the number of rows of the problem. Each task of the backward has its own partial
// sum of dweight, and the partial sums are added in the order of the tasks.
#include "efla/cpu/rms_norm.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/rms_norm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "efla/cpu/common/element-inl.h"
#include "efla/cpu/common/sigmoid-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Returns the sum over a row of n elements. f(d, i, sum) adds the elements at i to a vector of sums: full vectors to
// two vectors of sums in alternation, then the remaining elements one by one.
template <class F>
HWY_INLINE float sum_over(std::int64_t n, F&& f) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto even = hn::Zero(d), odd = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    even = f(d, i, even);
    odd = f(d, i + lanes, odd);
  }
  if (i + lanes <= n) {
    even = f(d, i, even);
    i += lanes;
  }
  auto rest = hn::Zero(d1);
  for (; i < n; ++i) rest = f(d1, i, rest);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd))) + hn::GetLane(rest);
}

// Returns 1/√(mean(x²) + eps) of a row.
template <class T>
HWY_INLINE float inverse_rms(const T* x, std::int64_t n, float eps) {
  const float sum = sum_over(n, [&](auto d, std::int64_t i, auto acc) HWY_ATTR {
    const auto v = load(d, x + i);
    return hn::MulAdd(v, v, acc);
  });
  return 1.0F / std::sqrt(sum / static_cast<float>(n) + eps);
}

template <class D>
HWY_INLINE hn::Vec<D> weighted(D d, const float* weight, std::size_t i, hn::Vec<D> x) {
  return weight ? hn::Mul(x, hn::LoadU(d, weight + i)) : x;
}

// act(z) of a gate z and its derivative.
template <class D>
struct Gate {
  hn::Vec<D> value, slope;
};

template <class D>
HWY_INLINE Gate<D> gate_of(D d, hn::Vec<D> z, GateActivation activation) {
  const auto sigma = sigmoid(d, z), rest = hn::Sub(hn::Set(d, 1.0F), sigma);
  if (activation == GateActivation::sigmoid) return {sigma, hn::Mul(sigma, rest)};
  return {hn::Mul(z, sigma), hn::Mul(sigma, hn::MulAdd(z, rest, hn::Set(d, 1.0F)))};
}

template <bool kGated, class T>
void norm_forward(const RmsNormForward<T>& p, std::int64_t begin, std::int64_t end) {
  const std::int64_t n = p.x.extent[1];
  const float* weight = p.weight.data;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = p.x.at(row);
    const T* gate = kGated ? p.gate.at(row) : nullptr;
    T* y = p.y.at(row);
    const float r = inverse_rms(x, n, p.eps);
    for_each_vector(n, [&](auto d, std::size_t i) HWY_ATTR {
      auto out = weighted(d, weight, i, hn::Mul(load(d, x + i), hn::Set(d, r)));
      if constexpr (kGated) out = hn::Mul(out, gate_of(d, load(d, gate + i), p.activation).value);
      store(d, out, y + i);
    });
  }
}

// Computes dx and dgate of rows [begin, end), and adds du·x·r to dweight_part, unless it is null.
template <bool kGated, class T>
void norm_backward(const RmsNormBackward<T>& p, std::int64_t begin, std::int64_t end, float* dweight_part) {
  const std::int64_t n = p.x.extent[1];
  const float* weight = p.weight.data;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = p.x.at(row);
    const T* dy = p.dy.at(row);
    const T* gate = kGated ? p.gate.at(row) : nullptr;
    T* dx = p.dx.at(row);
    T* dgate = kGated ? p.dgate.at(row) : nullptr;
    const float r = inverse_rms(x, n, p.eps);
    const float dot = sum_over(n, [&](auto d, std::int64_t i, auto acc) HWY_ATTR {
      auto du = load(d, dy + i);
      if constexpr (kGated) du = hn::Mul(du, gate_of(d, load(d, gate + i), p.activation).value);
      return hn::MulAdd(weighted(d, weight, i, du), load(d, x + i), acc);
    });
    const float pull = r * r * (dot / static_cast<float>(n));
    for_each_vector(n, [&](auto d, std::size_t i) HWY_ATTR {
      const auto vx = load(d, x + i), vdy = load(d, dy + i), vr = hn::Set(d, r);
      auto du = vdy;
      if constexpr (kGated) {
        const auto act = gate_of(d, load(d, gate + i), p.activation);
        du = hn::Mul(vdy, act.value);
        store(d, hn::Mul(weighted(d, weight, i, hn::Mul(hn::Mul(vdy, vx), vr)), act.slope), dgate + i);
      }
      if (dweight_part) {
        const auto term = hn::Mul(hn::Mul(du, vx), vr);
        hn::StoreU(hn::Add(hn::LoadU(d, dweight_part + i), term), d, dweight_part + i);
      }
      const auto inner = hn::NegMulAdd(vx, hn::Set(d, pull), weighted(d, weight, i, du));
      store(d, hn::Mul(inner, vr), dx + i);
    });
  }
}

void norm_forward_f32(const RmsNormForward<float>& p, std::int64_t begin, std::int64_t end) {
  p.gate ? norm_forward<true>(p, begin, end) : norm_forward<false>(p, begin, end);
}
void norm_forward_bf16(const RmsNormForward<bfloat16>& p, std::int64_t begin, std::int64_t end) {
  p.gate ? norm_forward<true>(p, begin, end) : norm_forward<false>(p, begin, end);
}
void norm_backward_f32(const RmsNormBackward<float>& p, std::int64_t begin, std::int64_t end, float* dweight_part) {
  p.gate ? norm_backward<true>(p, begin, end, dweight_part) : norm_backward<false>(p, begin, end, dweight_part);
}
void norm_backward_bf16(const RmsNormBackward<bfloat16>& p, std::int64_t begin, std::int64_t end, float* dweight_part) {
  p.gate ? norm_backward<true>(p, begin, end, dweight_part) : norm_backward<false>(p, begin, end, dweight_part);
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

// Returns the rows per task: enough to make adding a partial sum cheap compared with the task, with at most kMostParts
// tasks.
std::int64_t rows_per_part(std::int64_t rows) {
  constexpr std::int64_t kLeast = 128, kMostParts = 64;
  return std::max(kLeast, (rows + kMostParts - 1) / kMostParts);
}

// Returns the number of tasks, each of which has a partial sum of dweight.
std::int64_t partial_sums(std::int64_t rows) { return (rows + rows_per_part(rows) - 1) / rows_per_part(rows); }

}  // namespace

HWY_EXPORT(norm_forward_f32);
HWY_EXPORT(norm_forward_bf16);
HWY_EXPORT(norm_backward_f32);
HWY_EXPORT(norm_backward_bf16);

std::size_t rms_norm_workspace_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(partial_sums(rows) * columns) * sizeof(float);
}

template <class T>
void rms_norm(const RmsNormForward<T>& p, ThreadPool& pool) {
  const std::int64_t rows = p.x.extent[0], step = rows_per_part(rows);
  pool.run(partial_sums(rows), [&](std::int64_t part, int) {
    const std::int64_t begin = part * step, end = std::min(rows, begin + step);
    if constexpr (sizeof(T) == sizeof(float)) {
      HWY_DYNAMIC_DISPATCH(norm_forward_f32)(p, begin, end);
    } else {
      HWY_DYNAMIC_DISPATCH(norm_forward_bf16)(p, begin, end);
    }
  });
}

template <class T>
void rms_norm(const RmsNormBackward<T>& p, Workspace workspace, ThreadPool& pool) {
  const std::int64_t rows = p.x.extent[0], columns = p.x.extent[1], step = rows_per_part(rows);
  const std::int64_t parts = partial_sums(rows);
  const auto sums = View<float, 2>::contiguous(reinterpret_cast<float*>(workspace.data), {parts, columns});
  pool.run(parts, [&](std::int64_t part, int) {
    const std::int64_t begin = part * step, end = std::min(rows, begin + step);
    float* dweight_part = p.dweight ? sums.at(part) : nullptr;
    if (dweight_part) std::fill_n(dweight_part, columns, 0.0F);
    if constexpr (sizeof(T) == sizeof(float)) {
      HWY_DYNAMIC_DISPATCH(norm_backward_f32)(p, begin, end, dweight_part);
    } else {
      HWY_DYNAMIC_DISPATCH(norm_backward_bf16)(p, begin, end, dweight_part);
    }
  });
  if (!p.dweight) return;
  std::fill_n(p.dweight.data, columns, 0.0F);
  for (std::int64_t part = 0; part < parts; ++part) {
    const float* from = sums.at(part);
    for (std::int64_t i = 0; i < columns; ++i) p.dweight.data[i] += from[i];
  }
}

template void rms_norm(const RmsNormForward<float>&, ThreadPool&);
template void rms_norm(const RmsNormForward<bfloat16>&, ThreadPool&);
template void rms_norm(const RmsNormBackward<float>&, Workspace, ThreadPool&);
template void rms_norm(const RmsNormBackward<bfloat16>&, Workspace, ThreadPool&);

}  // namespace efla::cpu
#endif
