// The derivatives of the gain α(β, λ) of rule/step_size.h for many tokens at once. Included once per target.
#if defined(EFLA_CPU_GAIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_CPU_GAIN_INL_H_
#undef EFLA_CPU_GAIN_INL_H_
#else
#define EFLA_CPU_GAIN_INL_H_
#endif

#include <array>

#include "efla/cpu/tile-inl.h"
#include "efla/rule/problem.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Coefficients of φ(x) = (1 − e^{−x})/x, (−1)ⁿ/(n+1)!; for |x| < 1 these many reach the rounding of float32 in φ and
// φ′.
inline constexpr auto kExactPhiSeries = [] {
  std::array<float, 12> series{};
  double term = 1.0;
  for (std::size_t n = 0; n < series.size(); ++n) {
    series[n] = static_cast<float>(term);
    term /= -static_cast<double>(n + 2);
  }
  return series;
}();

// The derivatives of α of a chunk's tokens.
struct GainSlopes {
  HWY_ALIGN float dbeta[kChunk], dlambda[kChunk];
};

// dα/dβ = e^{−x} and dα/dλ = β² φ′(x), x = βλ, of the exact step for `count` tokens, a multiple of kLanes. φ′ is
// (e^{−x} − φ)/x, and near 0, where that cancels, Taylor's series, by Horner's scheme for φ and φ′ together.
HWY_INLINE void exact_gain_slopes(std::int64_t count, const float* beta, const float* lambda, GainSlopes& slopes) {
  const FloatTag d;
  const FloatVec one = hn::Set(d, 1.0F), least = hn::Set(d, static_cast<float>(kMinKeyNormSquared));
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const FloatVec b = hn::Load(d, beta + i);
    const FloatVec x = hn::Mul(b, hn::Max(hn::Load(d, lambda + i), least));
    FloatVec phi = hn::Zero(d), slope = hn::Zero(d);
    for (std::size_t n = kExactPhiSeries.size(); n-- > 0;) {
      slope = hn::MulAdd(slope, x, phi);
      phi = hn::MulAdd(phi, x, hn::Set(d, kExactPhiSeries[n]));
    }
    const FloatVec eigenvalue = hn::Exp(d, hn::Min(hn::Neg(x), hn::Set(d, 100.0F)));  // infinite long before
    const FloatVec far_phi = hn::Div(hn::Sub(one, eigenvalue), x);
    const FloatVec far_slope = hn::Div(hn::Sub(eigenvalue, far_phi), x);
    hn::Store(eigenvalue, d, slopes.dbeta + i);
    hn::Store(hn::Mul(hn::Mul(b, b), hn::IfThenElse(hn::Lt(hn::Abs(x), one), slope, far_slope)), d, slopes.dlambda + i);
  }
}

// β and λ hold kChunk elements, of which the tokens' count.
HWY_NOINLINE inline GainSlopes gain_slopes(const StepSize& step, std::int64_t tokens, const float* beta,
                                           const float* lambda) {
  GainSlopes slopes;
  if (step.integrator == Integrator::exact) {
    exact_gain_slopes(round_up(tokens, kLanes), beta, lambda, slopes);
    return slopes;
  }
  for (std::int64_t r = 0; r < tokens; ++r) {
    const Gain<float> gains = gain(step, beta[r], lambda[r]);
    slopes.dbeta[r] = gains.dalpha_dbeta;
    slopes.dlambda[r] = gains.dalpha_dlambda;
  }
  return slopes;
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
