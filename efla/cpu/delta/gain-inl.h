// The gain α(β, λ) of rule/step_size.h and its derivatives for the tokens of a chunk: the gains of the exact step in
// whole vectors, the gains of other steps token by token. docs/numerics.md explains the precision. Arrays hold kChunk
// elements. Included once per target.
#if defined(EFLA_CPU_GAIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_GAIN_INL_H_
#undef EFLA_CPU_GAIN_INL_H_
#else
#define EFLA_CPU_GAIN_INL_H_
#endif

#include <algorithm>
#include <array>

#include "efla/cpu/common/tile-inl.h"
#include "efla/cpu/delta/keys.h"
#include "efla/rule/problem.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
inline namespace EFLA_KEYS {

// Coefficients of φ(x) = (1 − e^{−x})/x, (−1)ⁿ/(n+1)!; for |x| < 1 this number of terms reaches the rounding of float32
// in φ and φ′.
inline constexpr auto kExactPhiSeries = [] {
  std::array<float, 12> series{};
  double term = 1.0;
  for (std::size_t n = 0; n < series.size(); ++n) {
    series[n] = static_cast<float>(term);
    term /= -static_cast<double>(n + 2);
  }
  return series;
}();

// Return α and its derivatives from β and λ, with kTwoKeys from β and μ.
HWY_INLINE float alpha_of(const StepSize& step, float beta, float lambda) {
  if constexpr (kTwoKeys) return two_key_alpha(step, beta, lambda);
  return gain_alpha(step, beta, lambda);
}
HWY_INLINE Gain<float> gain_of(const StepSize& step, float beta, float lambda) {
  if constexpr (kTwoKeys) return two_key_gain(step, beta, lambda);
  return gain(step, beta, lambda);
}

// Computes the gains of the exact step, α = (1 − e^{−βλ})/λ, in whole vectors of float64, because Highway's expm1 of
// float32 may be wrong by several units in the last place. Sets β and λ beyond `tokens` to 0. An infinite λ gives NaN.
// With kTwoKeys λ is μ of two_key_alpha.
HWY_INLINE void exact_gains(std::int64_t tokens, const StepSize& step, float* beta, float* lambda, float* erase,
                            float* write) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> d32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::fill(beta + tokens, beta + kChunk, 0.0F);
  std::fill(lambda + tokens, lambda + kChunk, 0.0F);
  for (std::int64_t r = 0; r < tokens; r += lanes) {
    const auto b = hn::PromoteTo(d, hn::Load(d32, beta + r));
    auto l = hn::PromoteTo(d, hn::Load(d32, lambda + r));
    if constexpr (!kTwoKeys) l = hn::Max(hn::Set(d, kMinKeyNormSquared), l);
    const auto x = hn::Neg(hn::Mul(b, l));
    // Beyond these bounds 1 − e^x is 1 or overflows float32, and Highway's expm1 is not defined.
    const auto bounded = hn::Clamp(x, hn::Set(d, -60.0), hn::Set(d, 700.0));
    const auto defined = hn::And(hn::IsFinite(l), hn::Not(hn::IsNaN(x)));
    auto alpha = hn::IfThenElse(defined, hn::Neg(hn::Div(hn::Expm1(d, bounded), l)), hn::NaN(d));
    if constexpr (kTwoKeys) alpha = hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(d, 1e-30)), b, alpha);  // μ may be 0
    hn::Store(hn::DemoteTo(d32, hn::Mul(alpha, hn::Set(d, step.erase_scale))), d32, erase + r);
    hn::Store(hn::DemoteTo(d32, hn::Mul(alpha, hn::Set(d, step.write_scale))), d32, write + r);
  }
}

// Computes the erase and write gains a and b of `tokens` tokens from β and λ, whose elements beyond `tokens` may
// change. With kTwoKeys λ is μ of two_key_alpha.
HWY_NOINLINE inline void compute_gains(std::int64_t tokens, const StepSize& step, float* beta, float* lambda,
                                       float* erase, float* write) {
  if (step.integrator == Integrator::exact) return exact_gains(tokens, step, beta, lambda, erase, write);
  for (std::int64_t r = 0; r < tokens; ++r) {
    const float alpha = alpha_of(step, beta[r], lambda[r]);
    erase[r] = static_cast<float>(step.erase_scale) * alpha;
    write[r] = static_cast<float>(step.write_scale) * alpha;
  }
}

// The derivatives of α of a chunk's tokens, as Gain has them: slopes times squares of powers of two.
struct GainSlopes {
  HWY_ALIGN float beta_slope[kChunk], beta_unit[kChunk], lambda_slope[kChunk], lambda_unit[kChunk];
};

// Computes dα/dβ = e^{−x} and dα/dλ = β² φ′(x), x = βλ, of the exact step for `count` tokens, a multiple of kLanes. φ′
// is (e^{−x} − φ)/x. This difference cancels near 0, so for |x| < 1 φ′ is a Taylor series, summed by Horner's scheme
// together with φ. With kTwoKeys λ is μ of two_key_gain.
HWY_INLINE void exact_gain_slopes(std::int64_t count, const float* beta, const float* lambda, GainSlopes& slopes) {
  const FloatTag d;
  HWY_ALIGN float longest_steps[kChunk];
  for (std::int64_t r = 0; r < count; ++r) {
    float unit = detail::lambda_unit(std::max(lambda[r], static_cast<float>(kMinKeyNormSquared)));
    if constexpr (kTwoKeys) {
      unit = detail::lambda_unit(std::max(std::abs(lambda[r]), static_cast<float>(kMinKeyNormSquared)));
    }
    slopes.lambda_unit[r] = unit;
    longest_steps[r] = detail::longest_step(unit);
  }
  const FloatVec one = hn::Set(d, 1.0F), least = hn::Set(d, static_cast<float>(kMinKeyNormSquared));
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const FloatVec time = hn::Load(d, beta + i), size = hn::Max(hn::Load(d, lambda + i), least);
    const FloatVec l = kTwoKeys ? hn::Load(d, lambda + i) : size;
    const FloatVec unit = hn::Load(d, slopes.lambda_unit + i), longest = hn::Load(d, longest_steps + i);
    const FloatVec b = hn::IfThenElse(hn::Gt(time, longest), longest, time);
    const FloatVec x = hn::Mul(b, l);
    FloatVec phi = hn::Zero(d), slope = hn::Zero(d);
    for (std::size_t n = kExactPhiSeries.size(); n-- > 0;) {
      slope = hn::MulAdd(slope, x, phi);
      phi = hn::MulAdd(phi, x, hn::Set(d, kExactPhiSeries[n]));
    }
    const FloatVec eigenvalue = hn::Exp(d, hn::Min(hn::Neg(x), hn::Set(d, 100.0F)));  // e^100 is infinite in float32
    const FloatVec far_phi = hn::Div(hn::Sub(one, eigenvalue), x);
    const FloatVec far_slope = hn::Div(hn::Sub(eigenvalue, far_phi), x);
    const FloatVec scaled = hn::Div(b, unit);
    hn::Store(eigenvalue, d, slopes.beta_slope + i);
    hn::Store(one, d, slopes.beta_unit + i);
    hn::Store(hn::Mul(hn::Mul(scaled, scaled), hn::IfThenElse(hn::Lt(hn::Abs(x), one), slope, far_slope)), d,
              slopes.lambda_slope + i);
  }
}

// Returns the derivatives of the tokens' gains.
HWY_NOINLINE inline GainSlopes gain_slopes(const StepSize& step, std::int64_t tokens, const float* beta,
                                           const float* lambda) {
  GainSlopes slopes;
  if (step.integrator == Integrator::exact) {
    exact_gain_slopes(round_up(tokens, kLanes), beta, lambda, slopes);
    return slopes;
  }
  for (std::int64_t r = 0; r < tokens; ++r) {
    const Gain<float> gains = gain_of(step, beta[r], lambda[r]);
    slopes.beta_slope[r] = gains.beta_slope;
    slopes.beta_unit[r] = gains.beta_unit;
    slopes.lambda_slope[r] = gains.lambda_slope;
    slopes.lambda_unit[r] = gains.lambda_unit;
  }
  return slopes;
}

}  // namespace EFLA_KEYS
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
