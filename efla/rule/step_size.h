// The step size: which integrator of dS/dτ = −k kᵀ S + k vᵀ over a time β turns (β, λ = ‖k‖²) into the gain α of
// S_t = (I − α k kᵀ) S_{t−1} + α k vᵀ. EFLA paper, equations 5 (euler), 11 to 13 (rk), 20 (exact).
//
// With x = βλ every integrator is α = β φ(x), so dα/dβ = φ + x φ′ and dα/dλ = β² φ′; a row below gives φ and φ′:
//
//   euler           1                               DeltaNet
//   rk(N)           Σ_{n<N} (−x)ⁿ/(n+1)!            Runge–Kutta of order N
//   exact           (1 − e^{−x})/x                  EFLA: the eigenvalue 1 − αλ = e^{−x} stays in (0, 1]
//   implicit_euler  1/(1 + x)                       Longhorn
//   trapezoid       1/(1 + x/2)                     bilinear: eigenvalue in (−1, 1]
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

namespace efla {

enum class Integrator { euler, rk, exact, implicit_euler, trapezoid };

// λ below this counts as this (EFLA paper, appendix A).
inline constexpr double kMinKeyNormSquared = 1e-12;
inline constexpr int kMaxRungeKuttaOrder = 64;

// Erase gain a = erase_scale · α(β, λ), write gain b = write_scale · α(β, λ).
struct StepSize {
  Integrator integrator = Integrator::exact;
  int order = 0;  // N of rk(N), in [1, kMaxRungeKuttaOrder]; unused otherwise
  double erase_scale = 1.0;
  double write_scale = 1.0;
};

// Reads euler, rkN (rk2, rk4, …), exact, implicit_euler, trapezoid; throws Error with the nearest name otherwise.
StepSize parse_step_size(std::string_view name);
std::string name_of(const StepSize& step);

// α and its derivatives.
template <class Real>
struct Gain {
  Real alpha, dalpha_dbeta, dalpha_dlambda;
};

namespace detail {

// φ(x) = (1 − e^{−x})/x and φ′(x) = (x e^{−x} − 1 + e^{−x})/x². Near 0 the numerator of φ′ cancels, so its Taylor
// series Σ (−1)ⁿ⁺¹ (n+1)/(n+2)! xⁿ is summed there: 20 terms reach 2⁻⁵³ for |x| ≤ 1.
template <class Real>
void exact_phi(Real x, Real& phi, Real& slope) {
  phi = std::abs(x) < Real(1e-30) ? Real(1) : -std::expm1(-x) / x;
  if (std::abs(x) < Real(1)) {
    Real sum = 0, term = Real(-0.5);
    for (int n = 0; n < 20; ++n) {
      sum += term;
      term *= -x * Real(n + 2) / (Real(n + 1) * Real(n + 3));
    }
    slope = sum;
  } else {
    slope = (std::exp(-x) - phi) / x;
  }
}

template <class Real>
void runge_kutta_phi(Real x, int order, Real& phi, Real& slope) {
  Real power = 1;  // (−x)ⁿ/(n+1)!
  phi = 1;
  slope = 0;
  Real slope_power = Real(-0.5);  // d/dx of (−x)ⁿ/(n+1)! is −n (−x)ⁿ⁻¹/(n+1)!
  for (int n = 1; n < order; ++n) {
    power *= -x / Real(n + 1);
    phi += power;
    slope += Real(n) * slope_power;
    slope_power *= -x / Real(n + 2);
  }
}

}  // namespace detail

// α(β, λ) by the integrator of `step`; the scales of `step` are not applied.
template <class Real>
Gain<Real> gain(const StepSize& step, Real beta, Real lambda) {
  lambda = std::max(lambda, Real(kMinKeyNormSquared));
  const Real x = beta * lambda;
  Real phi = 1, slope = 0;
  switch (step.integrator) {
    case Integrator::euler:
      break;
    case Integrator::rk:
      detail::runge_kutta_phi(x, step.order, phi, slope);
      break;
    case Integrator::exact:
      detail::exact_phi(x, phi, slope);
      break;
    case Integrator::implicit_euler:
      phi = 1 / (1 + x);
      slope = -phi * phi;
      break;
    case Integrator::trapezoid:
      phi = 1 / (1 + x / 2);
      slope = -phi * phi / 2;
      break;
  }
  return {beta * phi, phi + x * slope, beta * beta * slope};
}

}  // namespace efla
