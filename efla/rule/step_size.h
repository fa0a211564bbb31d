// The step size: the integrator of dS/dτ = −k kᵀ S + k vᵀ over a time β, which turns (β, λ = ‖k‖²) into the gain α of
// S_t = (I − α k kᵀ) S_{t−1} + α k vᵀ. Equations 5 (euler), 11 to 13 (rk) and 20 (exact) of EFLA (arXiv 2512.12602).
//
// With x = βλ every integrator is α = β φ(x), so dα/dβ = (xφ)′ and dα/dλ = β² φ′; a row below gives the name, φ, (xφ)′
// and a remark:
//
//   euler           1                     1                     DeltaNet
//   rk(N)           Σ_{n<N} (−x)ⁿ/(n+1)!  Σ_{n<N} (−x)ⁿ/n!      Runge–Kutta of order N
//   exact           (1 − e^{−x})/x        e^{−x}                EFLA: the eigenvalue 1 − αλ = e^{−x} stays in (0, 1]
//   implicit_euler  1/(1 + x)             φ²                    Longhorn
//   trapezoid       1/(1 + x/2)           φ²                    bilinear: eigenvalue in (−1, 1]
//
// For large x the last three have α = c/λ and dα/dλ = −c/λ² to rounding, with c = 1, 1 and 2, whatever β is.
//
// With an erase key κ beside k the equation is dS/dτ = −k κᵀ S + k vᵀ. Since (k κᵀ)² = μ k κᵀ with μ = κᵀk, all of the
// above holds with μ in the place of λ, except that μ may be negative: two_key_alpha says what happens then.
//
// The functions are constexpr so that CUDA kernels call them too.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

namespace efla {

enum class Integrator { euler, rk, exact, implicit_euler, trapezoid };

// A smaller λ is replaced by this value (EFLA, appendix A).
inline constexpr double kMinKeyNormSquared = 1e-12;
inline constexpr int kMaxRungeKuttaOrder = 64;

// Erase gain a = erase_scale · α(β, λ), write gain b = write_scale · α(β, λ).
struct StepSize {
  Integrator integrator = Integrator::exact;
  int order = 0;  // N of rk(N), in [1, kMaxRungeKuttaOrder]; unused otherwise
  double erase_scale = 1.0;
  double write_scale = 1.0;
};

// Parses euler, rkN (rk2, rk4, …), exact, implicit_euler or trapezoid. Throws Error with the nearest name otherwise.
StepSize parse_step_size(std::string_view name);
std::string name_of(const StepSize& step);

// α and its derivatives. Each derivative is a slope times the square of a power of two, because for λ = 1e36 the
// derivative with respect to λ is near 1e-72, which underflows in float32. The product of this derivative with da ≈ λ
// and k ≈ √λ, which is the gradient of the key, does not underflow.
template <class Real>
struct Gain {
  Real alpha;
  Real beta_slope, beta_unit;      // dα/dβ = beta_slope · beta_unit²
  Real lambda_slope, lambda_unit;  // dα/dλ = lambda_slope · lambda_unit²

  constexpr Real dalpha_dbeta() const { return beta_slope * beta_unit * beta_unit; }
  constexpr Real dalpha_dlambda() const { return lambda_slope * lambda_unit * lambda_unit; }
};

namespace detail {

template <class Real>
using Bits = std::conditional_t<sizeof(Real) == sizeof(std::uint32_t), std::uint32_t, std::uint64_t>;
template <class Real>
inline constexpr auto kExponentBits = std::bit_cast<Bits<Real>>(std::numeric_limits<Real>::infinity());

// Returns the largest power of two that is at most |x|, or the smallest normal number.
template <class Real>
constexpr Real power_of_two_below(Real x) {
  const Bits<Real> bits = std::bit_cast<Bits<Real>>(x) & kExponentBits<Real>;
  return std::max(std::bit_cast<Real>(bits), std::numeric_limits<Real>::min());
}

// Returns a power of two near 1/√λ, for λ of at least kMinKeyNormSquared; 0 for infinity.
template <class Real>
constexpr Real lambda_unit(Real lambda) {
  const Bits<Real> bits = std::bit_cast<Bits<Real>>(lambda) & kExponentBits<Real>;
  if (bits == kExponentBits<Real>) return 0;
  return std::bit_cast<Real>((3 * std::bit_cast<Bits<Real>>(Real(1)) - bits) / 2 & kExponentBits<Real>);
}

// Returns φ(x) of the exact step, (1 − e^{−x})/x.
template <class Real>
constexpr Real exact_phi(Real x) {
  return std::abs(x) < Real(1e-30) ? Real(1) : -std::expm1(-x) / x;
}

// Returns φ′(x) = (x e^{−x} − 1 + e^{−x})/x² of the exact step. The numerator cancels near 0. For |x| < 1 the function
// therefore sums the Taylor series Σ (−1)ⁿ⁺¹ (n+1)/(n+2)! xⁿ, with enough terms for the rounding of Real.
template <class Real>
constexpr Real exact_phi_slope(Real x) {
  if (std::abs(x) >= Real(1)) return (std::exp(-x) - exact_phi(x)) / x;
  constexpr int terms = sizeof(Real) == sizeof(float) ? 11 : 20;
  Real sum = 0, term = Real(-0.5);
  for (int n = 0; n < terms; ++n) {
    sum += term;
    term *= -x * Real(n + 2) / (Real(n + 1) * Real(n + 3));
  }
  return sum;
}

// Returns φ(x) of rk(order) by Horner's scheme: 1 − x/2 (1 − x/3 (1 − …)).
template <class Real>
constexpr Real runge_kutta_phi(Real x, int order) {
  Real phi = 1;
  for (int n = order; n >= 2; --n) phi = 1 - phi * x / Real(n);
  return phi;
}

// Returns φ′(x) of rk(order), by the derivative of Horner's scheme.
template <class Real>
constexpr Real runge_kutta_phi_slope(Real x, int order) {
  Real phi = 1, slope = 0;
  for (int n = order; n >= 2; --n) {
    slope = -(slope * x + phi) / Real(n);
    phi = 1 - phi * x / Real(n);
  }
  return slope;
}

// Returns (xφ)′ of rk(order), which is the eigenvalue of rk(order − 1): 1 − x (1 − x/2 (1 − …)).
template <class Real>
constexpr Real runge_kutta_time_slope(Real x, int order) {
  Real sum = 1;
  for (int n = order - 1; n >= 1; --n) sum = 1 - sum * x / Real(n);
  return sum;
}

// Returns φ(x) of an integrator.
template <class Real>
constexpr Real phi(const StepSize& step, Real x) {
  switch (step.integrator) {
    case Integrator::euler:
      return 1;
    case Integrator::rk:
      return runge_kutta_phi(x, step.order);
    case Integrator::exact:
      return exact_phi(x);
    case Integrator::implicit_euler:
      return 1 / (1 + x);
    case Integrator::trapezoid:
      return 1 / (1 + x / 2);
  }
  return 1;
}

// Returns φ′(x) of an integrator.
template <class Real>
constexpr Real phi_slope(const StepSize& step, Real x) {
  const Real value = phi(step, x);
  switch (step.integrator) {
    case Integrator::euler:
      return 0;
    case Integrator::rk:
      return runge_kutta_phi_slope(x, step.order);
    case Integrator::exact:
      return exact_phi_slope(x);
    case Integrator::implicit_euler:
      return -value * value;
    case Integrator::trapezoid:
      return -value * value / 2;
  }
  return 0;
}

// Returns (xφ)′ in closed form, because φ + x φ′ would cancel for large x.
template <class Real>
constexpr Real time_slope(const StepSize& step, Real x) {
  const Real value = phi(step, x);
  switch (step.integrator) {
    case Integrator::euler:
      return 1;
    case Integrator::rk:
      return runge_kutta_time_slope(x, step.order);
    case Integrator::exact:
      return std::exp(-x);
    case Integrator::implicit_euler:
    case Integrator::trapezoid:
      return value * value;
  }
  return 1;
}

// Returns whether the step divides by 1 + x or 1 + x/2.
constexpr bool is_implicit(const StepSize& step) {
  return step.integrator == Integrator::implicit_euler || step.integrator == Integrator::trapezoid;
}

// Returns the largest β that is needed for keys of λ, from unit = lambda_unit(λ): a power of two for which x is between
// 16/ε and 64/ε. For such x exact, implicit_euler and trapezoid have reached α = c/λ to rounding.
template <class Real>
constexpr Real longest_step(Real unit) {
  return unit * (32 / std::numeric_limits<Real>::epsilon()) * unit;
}

// Returns β for euler and rk, otherwise the smaller of β and longest_step, because with a larger β the numbers βλ, β²
// and φ² may leave the range of Real. For an infinite λ longest_step is 0, so that x and α are NaN. Otherwise α would
// be 0, and the token would have no effect.
template <class Real>
constexpr Real bounded_beta(const StepSize& step, Real beta, Real lambda) {
  if (step.integrator == Integrator::euler || step.integrator == Integrator::rk) return beta;
  return std::min(beta, longest_step(lambda_unit(lambda)));
}

}  // namespace detail

// Returns α(β, λ) of the integrator of `step`, without the scales of `step`.
template <class Real>
constexpr Real gain_alpha(const StepSize& step, Real beta, Real lambda) {
  const Real clipped = std::max(lambda, Real(kMinKeyNormSquared));
  const Real bounded = detail::bounded_beta(step, beta, clipped);
  return bounded * detail::phi(step, bounded * clipped);
}

// Returns α and its derivatives, without the scales of `step`.
template <class Real>
constexpr Gain<Real> gain(const StepSize& step, Real beta, Real lambda) {
  const Real clipped = std::max(lambda, Real(kMinKeyNormSquared)), x = beta * clipped;
  const Real bounded = detail::bounded_beta(step, beta, clipped);
  Gain<Real> result{gain_alpha(step, beta, lambda), detail::time_slope(step, x), 1, 0, detail::lambda_unit(clipped)};
  if (step.integrator == Integrator::implicit_euler || step.integrator == Integrator::trapezoid) {
    const Real value = detail::phi(step, x);
    result.beta_unit = detail::power_of_two_below(value);
    result.beta_slope = (value / result.beta_unit) * (value / result.beta_unit);
  }
  if (step.integrator == Integrator::euler) return result;  // dα/dλ is 0, and β² may be infinite
  const Real scaled = bounded / result.lambda_unit;
  result.lambda_slope = scaled * scaled * detail::phi_slope(step, bounded * clipped);
  return result;
}

// Returns α(β, μ) of a token with two keys whose product is μ = κᵀk. For μ < 0 the eigenvalue 1 − αμ is above 1, so the
// token lets the state grow along k. euler, rk(N) and exact are what their formulas say for every μ; exact overflows
// where e^{−βμ} does. implicit_euler and trapezoid have a pole at x = −1 and −2. For μ < 0 they take Euler's step α =
// β, to which they tend as μ → 0.
template <class Real>
constexpr Real two_key_alpha(const StepSize& step, Real beta, Real mu) {
  if (!(mu < Real(kMinKeyNormSquared))) return gain_alpha(step, beta, mu);
  if (mu < 0 && detail::is_implicit(step)) return beta;
  return beta * detail::phi(step, beta * mu);
}

// Returns this α and its derivatives, with dα/dμ in the place of dα/dλ.
template <class Real>
constexpr Gain<Real> two_key_gain(const StepSize& step, Real beta, Real mu) {
  if (!(mu < Real(kMinKeyNormSquared))) return gain(step, beta, mu);
  if (mu < 0 && detail::is_implicit(step)) return {beta, 1, 1, 0, 1};
  const Real unit = detail::lambda_unit(std::max(-mu, Real(kMinKeyNormSquared))), x = beta * mu, scaled = beta / unit;
  const Real slope = step.integrator == Integrator::euler ? 0 : scaled * scaled * detail::phi_slope(step, x);
  return {two_key_alpha(step, beta, mu), detail::time_slope(step, x), 1, slope, unit};
}

}  // namespace efla
