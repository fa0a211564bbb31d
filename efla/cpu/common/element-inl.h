// Loads and stores vectors of float32 from and to memory that holds float32 or bfloat16. Included once per target.
#if defined(EFLA_CPU_ELEMENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_ELEMENT_INL_H_
#undef EFLA_CPU_ELEMENT_INL_H_
#else
#define EFLA_CPU_ELEMENT_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "efla/base/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const bfloat16* from) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::Rebind<std::uint32_t, D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> x, float* to) {
  hn::StoreU(x, d, to);
}

// Rounds to nearest, ties to even, as to_bfloat16 does; a NaN stays a NaN.
template <class D>
HWY_INLINE void store([[maybe_unused]] D d, hn::Vec<D> x, bfloat16* to) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::Rebind<std::uint32_t, D> d32;
  const auto bits = hn::BitCast(d32, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1U));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffU))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40U));
  const auto chosen = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(x)), quiet, rounded);
  hn::StoreU(hn::TruncateTo(d16, chosen), d16, reinterpret_cast<std::uint16_t*>(to));
}

// Calls f(d, i) for every full vector of `count` elements, then with one-lane vectors for the rest.
template <class F>
HWY_INLINE void for_each_vector(std::size_t count, F&& f) {
  const hn::ScalableTag<float> d;
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) f(d, i);
  for (; i < count; ++i) f(hn::CappedTag<float, 1>(), i);
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // EFLA_CPU_ELEMENT_INL_H_
