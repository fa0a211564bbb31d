#include "efla/cpu/glu.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/glu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// These headers must come after foreach_target.h.
#include "efla/cpu/common/element-inl.h"
#include "efla/cpu/common/sigmoid-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

void glu_rows(const GluForward<float>& p, std::int64_t begin, std::int64_t end) {
  const bool silu = p.activation == GateActivation::silu;
  for (std::int64_t row = begin; row < end; ++row) {
    const float* up = p.up.at(row);
    const float* gate = p.gate.at(row);
    float* y = p.y.at(row);
    for_each_vector(static_cast<std::size_t>(p.gate.extent[1]), [&](auto d, std::size_t i) HWY_ATTR {
      const auto z = hn::LoadU(d, gate + i), sigma = sigmoid(d, z);
      hn::StoreU(hn::Mul(hn::LoadU(d, up + i), silu ? hn::Mul(z, sigma) : sigma), d, y + i);
    });
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {

HWY_EXPORT(glu_rows);

void glu(const GluForward<float>& p, ThreadPool& pool) {
  constexpr std::int64_t kTaskElements = 1 << 14;  // long compared with starting a task
  const std::int64_t rows = p.gate.extent[0], columns = std::max<std::int64_t>(1, p.gate.extent[1]);
  const std::int64_t step = std::max<std::int64_t>(1, kTaskElements / columns);
  pool.run((rows + step - 1) / step, [&](std::int64_t task, int) {
    HWY_DYNAMIC_DISPATCH(glu_rows)(p, task * step, std::min(rows, (task + 1) * step));
  });
}

}  // namespace efla::cpu
#endif
