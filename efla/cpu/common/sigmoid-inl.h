// The sigmoid of vectors of float32. Included once per target.
#if defined(EFLA_CPU_SIGMOID_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_SIGMOID_INL_H_
#undef EFLA_CPU_SIGMOID_INL_H_
#else
#define EFLA_CPU_SIGMOID_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Returns e^−|a|, and 0 for |a| > 87; a NaN stays a NaN. With −|a| = n ln 2 + r, e^r is the sum of a Taylor series
// whose next term is below 2⁻²⁷; the error is at most two units in the last place. Highway's Exp needs more
// instructions, because it covers all of float32.
template <class D>
HWY_INLINE hn::Vec<D> exp_of_negative(D d, hn::Vec<D> a) {
  const hn::Rebind<std::int32_t, D> di;
  const auto x = hn::Or(a, hn::Set(d, -0.0F));  // the n of a NaN with a sign has no bits that change the exponent
  const auto n = hn::NearestInt(hn::Mul(x, hn::Set(d, 1.44269504F)));
  const auto nf = hn::ConvertTo(d, n);
  // ln 2 is the sum of two numbers; products of n with the first number are exact.
  const auto r = hn::NegMulAdd(nf, hn::Set(d, -2.12194440e-4F), hn::NegMulAdd(nf, hn::Set(d, 0.693359375F), x));
  const auto r2 = hn::Mul(r, r);
  const auto p01 = hn::Add(r, hn::Set(d, 1.0F));
  const auto p23 = hn::MulAdd(r, hn::Set(d, 1.0F / 6), hn::Set(d, 1.0F / 2));
  const auto p45 = hn::MulAdd(r, hn::Set(d, 1.0F / 120), hn::Set(d, 1.0F / 24));
  const auto p67 = hn::MulAdd(r, hn::Set(d, 1.0F / 5040), hn::Set(d, 1.0F / 720));
  const auto p = hn::MulAdd(hn::Mul(r2, r2), hn::MulAdd(r2, p67, p45), hn::MulAdd(r2, p23, p01));
  const auto scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(n)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0F)), scaled);
}

// Returns the sigmoid through e^−|a|, which never overflows.
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> a) {
  const auto one = hn::Set(d, 1.0F);
  const auto exp = exp_of_negative(d, a);
  return hn::Div(hn::IfThenElse(hn::Lt(a, hn::Zero(d)), exp, one), hn::Add(one, exp));
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // EFLA_CPU_SIGMOID_INL_H_
