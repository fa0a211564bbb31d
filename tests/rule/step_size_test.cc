// The step sizes: their formulas, derivatives, limits and names.
#include "efla/rule/step_size.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/expect_error.h"

namespace efla {
namespace {

const std::vector<std::string> kNames{"euler",          "rk1",      "rk2", "rk3", "rk4", "rk7", "exact",
                                      "implicit_euler", "trapezoid"};

// α by the formulas of docs/equations.md, in extended precision.
long double formula(const StepSize& step, long double beta, long double lambda) {
  const long double x = beta * lambda;
  long double sum = 0, term = beta;
  switch (step.integrator) {
    case Integrator::euler:
      return beta;
    case Integrator::rk:
      for (int n = 0; n < step.order; ++n) {  // β Σ_{n<N} (−x)ⁿ/(n+1)!
        sum += term;
        term *= -x / (n + 2);
      }
      return sum;
    case Integrator::exact:
      return -std::expm1(-x) / lambda;
    case Integrator::implicit_euler:
      return beta / (1 + x);
    case Integrator::trapezoid:
      return beta / (1 + x / 2);
  }
  return std::numeric_limits<long double>::quiet_NaN();
}

// A central difference of fourth order.
template <class F>
long double slope(F f, long double x) {
  const long double h = x * 1e-4L;
  return (8 * (f(x + h) - f(x - h)) - (f(x + 2 * h) - f(x - 2 * h))) / (12 * h);
}

struct Point {
  double beta, lambda;
};

// x = βλ from 1e-12 to 1e10; Runge and Kutta's polynomials only where their terms do not cancel.
std::vector<Point> points(const StepSize& step) {
  std::vector<Point> points;
  for (const double beta : {1e-4, 0.03, 0.5, 1.0, 7.0}) {
    for (const double lambda : {1e-8, 1e-3, 0.1, 0.9, 1.1, 2.0, 10.0, 50.0, 1e4, 1e9}) {
      if (step.integrator != Integrator::rk || beta * lambda < 0.8) points.push_back({beta, lambda});
    }
  }
  return points;
}

// |got − expected| ≤ tolerance·|expected|, or both below the smallest normal number of Real.
template <class Real>
void expect_relatively_near(Real got, long double expected, double tolerance, const std::string& what) {
  const auto error = static_cast<double>(std::abs(static_cast<long double>(got) - expected));
  const double allowed = tolerance * static_cast<double>(std::abs(expected)) + std::numeric_limits<Real>::min();
  if (!(error <= allowed)) ADD_FAILURE() << what << ": got " << got << ", expected " << expected;
}

template <class Real>
void check_gains() {
  const double epsilon = std::numeric_limits<Real>::epsilon();
  for (const auto& name : kNames) {
    const StepSize step = parse_step_size(name);
    for (const auto& [beta, lambda] : points(step)) {
      const auto b = static_cast<Real>(beta), l = static_cast<Real>(lambda);
      const std::string where = name + " β " + std::to_string(beta) + " λ " + std::to_string(lambda);
      const Gain<Real> got = gain(step, b, l);
      EXPECT_EQ(got.alpha, gain_alpha(step, b, l)) << where;
      expect_relatively_near(got.alpha, formula(step, b, l), 8 * epsilon, where + " alpha");
      // x is rounded once, so e^{−x} is off by xε; the differences themselves are good to about 1e-13.
      const double x = std::min(beta * lambda, 800.0);
      const auto by_beta = slope([&](long double y) { return formula(step, y, l); }, b);
      const auto by_lambda = slope([&](long double y) { return formula(step, b, y); }, l);
      const double difference = 1e-12 * static_cast<double>(formula(step, b, l));
      const double beta_slope = static_cast<double>(got.dalpha_dbeta() - by_beta);
      EXPECT_LE(std::abs(beta_slope), (8 + x) * epsilon * std::abs(got.dalpha_dbeta()) + difference / beta) << where;
      const double lambda_slope = static_cast<double>(got.dalpha_dlambda() - by_lambda);
      EXPECT_LE(std::abs(lambda_slope), 12 * epsilon * std::abs(got.dalpha_dlambda()) + difference / lambda) << where;
    }
  }
}

TEST(StepSize, Float64GainsAndTheirDerivatives) { check_gains<double>(); }
TEST(StepSize, Float32GainsAndTheirDerivatives) { check_gains<float>(); }

// dα/dβ of the exact step is e^{−x} to the last digits, however large x.
TEST(StepSize, TheDerivativeByTimeDoesNotCancel) {
  const StepSize exact{Integrator::exact}, implicit{Integrator::implicit_euler}, trapezoid{Integrator::trapezoid};
  for (const double x : {0.5, 3.0, 20.0, 80.0}) {
    expect_relatively_near(gain(exact, 1.0F, static_cast<float>(x)).dalpha_dbeta(), std::exp(-x), 2e-7, "exact");
    expect_relatively_near(gain(exact, 1.0, x).dalpha_dbeta(), std::exp(-static_cast<long double>(x)), 1e-15, "exact");
  }
  EXPECT_EQ(gain(exact, 1.0, 1e8).dalpha_dbeta(), 0.0);
  expect_relatively_near(gain(implicit, 1.0F, 1e8F).dalpha_dbeta(), 1e-16, 1e-6, "implicit_euler");
  expect_relatively_near(gain(trapezoid, 1.0F, 1e8F).dalpha_dbeta(), 4e-16, 1e-6, "trapezoid");
}

TEST(StepSize, EveryGainIsBetaWhereTheKeyVanishes) {
  constexpr double kClip = 2 * kMinKeyNormSquared;  // what the clip of λ leaves: (xφ)′ ≥ 1 − 2x
  for (const auto& name : kNames) {
    const StepSize step = parse_step_size(name);
    for (const double lambda : {0.0, 1e-30, 1e-16}) {
      EXPECT_NEAR(gain(step, 0.7, lambda).alpha, 0.7, kClip) << name << ' ' << lambda;
      EXPECT_NEAR(gain(step, 0.7, lambda).dalpha_dbeta(), 1.0, kClip) << name << ' ' << lambda;
      EXPECT_FLOAT_EQ(gain(step, 0.7F, static_cast<float>(lambda)).alpha, 0.7F) << name << ' ' << lambda;
      EXPECT_FLOAT_EQ(gain(step, 0.7F, static_cast<float>(lambda)).dalpha_dbeta(), 1.0F) << name << ' ' << lambda;
    }
    EXPECT_EQ(gain(step, 0.0, 3.0).alpha, 0.0) << name;
    EXPECT_DOUBLE_EQ(gain(step, 0.0, 3.0).dalpha_dbeta(), 1.0) << name;
  }
}

TEST(StepSize, GainsOfHugeKeysStayFinite) {
  for (const float lambda : {1e8F, 1e12F, 1e30F}) {
    EXPECT_FLOAT_EQ(gain_alpha(StepSize{Integrator::exact}, 0.5F, lambda), 1 / lambda);
    EXPECT_FLOAT_EQ(gain_alpha(StepSize{Integrator::implicit_euler}, 0.5F, lambda), 1 / lambda);
    EXPECT_FLOAT_EQ(gain_alpha(StepSize{Integrator::trapezoid}, 0.5F, lambda), 2 / lambda);
    for (const auto* name : {"exact", "implicit_euler", "trapezoid"}) {
      const Gain<float> g = gain(parse_step_size(name), 0.5F, lambda);
      EXPECT_TRUE(std::isfinite(g.dalpha_dbeta()) && std::isfinite(g.dalpha_dlambda())) << name << ' ' << lambda;
    }
  }
}

// x = βλ is infinite in float32, β² and φ² leave its range, and a λ that is infinite itself gives NaN.
TEST(StepSize, GainsWhereFloat32OverflowsAreTheirLimits) {
  for (const float beta : {1e15F, 1e20F, 3e38F}) {
    for (const float lambda : {1e20F, 1e24F, 1e30F, 1e36F}) {
      for (const auto& [name, limit] :
           std::vector<std::pair<std::string, float>>{{"exact", 1}, {"implicit_euler", 1}, {"trapezoid", 2}}) {
        const std::string where = name + " β " + std::to_string(beta) + " λ " + std::to_string(lambda);
        const Gain<float> got = gain(parse_step_size(name), beta, lambda);
        EXPECT_FLOAT_EQ(got.alpha, limit / lambda) << where;
        const long double unit = got.lambda_unit;
        const long double expected = -static_cast<long double>(limit) / lambda / lambda;
        expect_relatively_near(static_cast<double>(got.lambda_slope * unit * unit), expected, 3e-7, where);
      }
    }
  }
  for (const auto* name : {"exact", "implicit_euler", "trapezoid"}) {
    EXPECT_TRUE(std::isnan(gain_alpha(parse_step_size(name), 0.5F, std::numeric_limits<float>::infinity()))) << name;
  }
}

// The derivative by β of implicit_euler and trapezoid is φ², which underflows in float32 from x = 1e19 on.
TEST(StepSize, TheDerivativeByTimeDoesNotUnderflow) {
  for (const float beta : {1e-6F, 1.0F, 1e6F}) {
    constexpr float kLambda = 1e30F;
    for (const auto& [name, limit] :
         std::vector<std::pair<std::string, long double>>{{"implicit_euler", 1}, {"trapezoid", 2}}) {
      const Gain<float> got = gain(parse_step_size(name), beta, kLambda);
      const long double unit = got.beta_unit, x = static_cast<long double>(beta) * kLambda;
      expect_relatively_near(static_cast<double>(got.beta_slope * unit * unit), limit * limit / x / x, 1e-6, name);
    }
  }
}

// In float32 1 − αλ may round below 0 or above 1 by its last digit, never further.
TEST(StepSize, TheExactEigenvalueStaysInItsRangeInFloat32) {
  for (double x = 1e-12; x < 1e9; x *= 1.7) {
    for (const float beta : {0.01F, 1.0F, 5.0F}) {
      const float lambda = static_cast<float>(x) / beta;
      const float eigenvalue = 1 - gain_alpha(StepSize{Integrator::exact}, beta, lambda) * lambda;
      EXPECT_TRUE(eigenvalue >= -2e-7F && eigenvalue <= 1) << "x " << x << " beta " << beta << ": " << eigenvalue;
    }
  }
}

TEST(StepSize, RungeKuttaIsWithinItsRemainderOfExact) {
  for (const double x : {0.1, 1.0, 2.0}) {
    const double exact = gain_alpha(StepSize{Integrator::exact}, 0.5, 2 * x);
    double remainder = 0.5;  // β x^N/(N+1)!
    for (int order = 1; order <= 20; ++order) {
      remainder *= x / (order + 1);
      const double error = std::abs(gain_alpha(StepSize{Integrator::rk, order}, 0.5, 2 * x) - exact);
      EXPECT_LE(error, remainder + 1e-15) << "x " << x << " rk" << order;
    }
  }
}

// The bounds that docs/equations.md gives for μ = κᵀk: the formulas for μ of either sign, and Euler's step where an
// implicit step would need μ ≥ 0.
template <class Real>
void check_two_key_gains() {
  const double epsilon = std::numeric_limits<Real>::epsilon();
  for (const auto& name : kNames) {
    const StepSize step = parse_step_size(name);
    for (const double beta : {0.03, 0.7, 1.0}) {
      for (const double size : {1e-12, 1e-6, 1e-3, 0.3, 0.9, 1.1, 10.0, 80.0, 1e6}) {
        for (const double sign : {1.0, -1.0}) {
          const auto b = static_cast<Real>(beta), mu = static_cast<Real>(sign * size);
          const double x = beta * size;
          if ((step.integrator == Integrator::rk && x >= 0.8) || (sign < 0 && x > 85)) continue;
          const std::string where = name + " β " + std::to_string(beta) + " μ " + std::to_string(mu);
          const StepSize expected =
              sign < 0 && step.integrator > Integrator::exact ? StepSize{Integrator::euler} : step;
          const Gain<Real> got = two_key_gain(step, b, mu);
          EXPECT_EQ(got.alpha, two_key_alpha(step, b, mu)) << where;
          const double rounding = sign < 0 ? 8 + x : 8;  // e^{|x|} has |x| times the relative error of x
          expect_relatively_near(got.alpha, formula(expected, b, mu), rounding * epsilon, where + " alpha");
          if (sign < 0 && x > 5) continue;  // differences of e^{|x|} are too coarse
          const auto by_beta = slope([&](long double y) { return formula(expected, y, mu); }, b);
          const auto by_mu = slope([&](long double y) { return formula(expected, b, y); }, mu);
          const double difference = 1e-12 * static_cast<double>(formula(expected, b, mu));
          const double bounded = std::min(x, 800.0);
          EXPECT_LE(std::abs(static_cast<double>(got.dalpha_dbeta() - by_beta)),
                    (8 + bounded) * epsilon * std::abs(got.dalpha_dbeta()) + difference / beta)
              << where;
          EXPECT_LE(std::abs(static_cast<double>(got.dalpha_dlambda() - by_mu)),
                    (12 + (sign < 0 ? bounded : 0)) * epsilon * std::abs(got.dalpha_dlambda()) + difference / size)
              << where;
        }
      }
    }
  }
}

TEST(StepSize, Float64GainsOfTwoKeys) { check_two_key_gains<double>(); }
TEST(StepSize, Float32GainsOfTwoKeys) { check_two_key_gains<float>(); }

TEST(StepSize, GainsOfTwoEqualKeysAreThoseOfOneKey) {
  for (const auto& name : kNames) {
    const StepSize step = parse_step_size(name);
    for (const float lambda : {1e-12F, 1e-3F, 0.7F, 3.0F, 1e6F, 1e30F}) {
      const Gain<float> one = gain(step, 0.6F, lambda), two = two_key_gain(step, 0.6F, lambda);
      EXPECT_EQ(one.alpha, two.alpha) << name << ' ' << lambda;
      EXPECT_EQ(one.dalpha_dbeta(), two.dalpha_dbeta()) << name << ' ' << lambda;
      EXPECT_EQ(one.lambda_slope, two.lambda_slope) << name << ' ' << lambda;
    }
  }
}

TEST(StepSize, OrthogonalKeysWriteWithBeta) {
  for (const auto& name : kNames) {
    const Gain<float> got = two_key_gain(parse_step_size(name), 0.6F, 0.0F);
    EXPECT_EQ(got.alpha, 0.6F) << name;
    EXPECT_EQ(got.dalpha_dbeta(), 1.0F) << name;
    const float expected = name == "euler" || name == "rk1" ? 0.0F : name == "implicit_euler" ? -0.36F : -0.18F;
    EXPECT_FLOAT_EQ(got.dalpha_dlambda(), expected) << name;
  }
}

TEST(StepSize, GainsOfTwoKeysThatHaveNoProduct) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  for (const auto* name : {"rk2", "exact", "implicit_euler", "trapezoid"}) {
    EXPECT_TRUE(std::isnan(two_key_alpha(parse_step_size(name), 0.5F, kNan))) << name;
  }
  for (const auto* name : {"exact", "implicit_euler", "trapezoid"}) {
    EXPECT_TRUE(std::isnan(two_key_alpha(parse_step_size(name), 0.5F, kInfinity))) << name;
  }
  EXPECT_EQ(two_key_alpha(StepSize{Integrator::exact}, 1.0F, -100.0F), kInfinity);
}

TEST(StepSize, NamesAreReadBack) {
  for (const auto& name : kNames) EXPECT_EQ(name_of(parse_step_size(name)), name);
  EXPECT_EQ(name_of(parse_step_size("rk64")), "rk64");
}

TEST(StepSize, WrongNamesGetTheNearestOne) {
  const auto expect = [](const char* name, const char* argument, const char* says) {
    test::expect_error([&] { parse_step_size(name); }, argument, says);
  };
  expect("exakt", "step", "got 'exakt', expected one of euler, rkN, exact, implicit_euler, trapezoid (nearest: exact)");
  expect("Euler", "step", "nearest: euler");
  expect("implicit-euler", "step", "nearest: implicit_euler");
  expect("rk", "step", "nearest: rk2");
  expect("rk4x", "step", "nearest: rk4");
  expect("rk 4", "step", "nearest: rk4");
  expect("rk+4", "step", "nearest: rk4");
  expect("", "step", "got ''");
  expect("rk0", "step", "got 'rk0', expected rk1 to rk64");
  expect("rk-2", "step", "got 'rk-2', expected rk1 to rk64");
  expect("rk65", "step", "got 'rk65', expected rk1 to rk64");
  expect("rk99999999999", "step", "nearest: ");
}

}  // namespace
}  // namespace efla
