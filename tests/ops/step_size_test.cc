// One token of the operator against the differential equation that its step size stands for, dS/dτ = f(S) = −k κᵀ S +
// k vᵀ over a time β, solved here by other means. κ is k, or a key of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/ops/delta.h"
#include "efla/ref/matrix.h"

namespace efla::test {
namespace {

using ref::Matrix;

Matrix operator*(double factor, Matrix m) {
  for (double& e : m.data) e *= factor;
  return m;
}

double norm(const Matrix& m) {
  double sum = 0;
  for (const double e : m.data) sum += e * e;
  return std::sqrt(sum);
}

// ‖a − b‖/‖b‖.
double distance(const Matrix& a, const Matrix& b) { return norm(a - b) / norm(b); }

Matrix random_matrix(std::int64_t rows, std::int64_t cols, Random& random) {
  Matrix m(rows, cols);
  for (double& e : m.data) e = random.normal();
  return m;
}

struct Token {
  Matrix k, v, state;  // [K, 1], [V, 1], [K, V] before the token
  Matrix erase_key;    // κ [K, 1]
  bool two_keys = false;
  double beta;

  // ‖k‖²·β = x.
  Token(double x, double beta, std::int64_t key_dim = 5, std::int64_t value_dim = 3) : beta(beta) {
    Random random(23);
    k = random_matrix(key_dim, 1, random);
    v = random_matrix(value_dim, 1, random);
    state = random_matrix(key_dim, value_dim, random);
    k = std::sqrt(std::abs(x) / beta) / norm(k) * k;
    erase_key = k;
  }

  // Returns a token of two keys with κᵀk·β = x, of either sign. Half of κ, by its squared length, is orthogonal to k.
  static Token with_two_keys(double x, double beta) {
    Token token(x, beta);
    Random random(24);
    token.two_keys = true;
    token.erase_key = random_matrix(token.k.rows, 1, random);
    token.orthogonalise_keys();
    token.erase_key = norm(token.k) / norm(token.erase_key) * token.erase_key + (x < 0 ? -1.0 : 1.0) * token.k;
    return token;
  }

  // Subtracts from κ what is along k.
  void orthogonalise_keys() {
    const double along = (transpose(erase_key) * k)(0, 0) / (transpose(k) * k)(0, 0);
    erase_key = erase_key - along * k;
  }

  Matrix slope(const Matrix& s) const { return k * transpose(v) - k * (transpose(erase_key) * s); }

  // The state after the token, by the operator.
  Matrix after(const std::string& step) const {
    DeltaForward<double> p;
    p.shape = {1, 1, 1, 1, k.rows, v.rows};
    p.rule.step = parse_step_size(step);
    std::vector<double> o(v.rows);
    Matrix result(k.rows, v.rows);
    p.q = p.k = View<const double, 4>::contiguous(k.data.data(), {1, 1, 1, k.rows});
    p.rule.two_keys = two_keys;
    if (two_keys) p.erase_key = View<const double, 4>::contiguous(erase_key.data.data(), {1, 1, 1, k.rows});
    p.v = View<const double, 4>::contiguous(v.data.data(), {1, 1, 1, v.rows});
    p.beta = View<const double, 3>::contiguous(&beta, {1, 1, 1});
    p.initial_state = View<const double, 4>::contiguous(state.data.data(), {1, 1, k.rows, v.rows});
    p.final_state = View<double, 4>::contiguous(result.data.data(), {1, 1, k.rows, v.rows});
    p.o = View<double, 4>::contiguous(o.data(), {1, 1, 1, v.rows});
    delta_forward(p, {.implementation = "ref"});
    return result;
  }
};

// e^A by its power series, scaled down and squared up again.
Matrix exponential(Matrix a) {
  const int squarings = std::max(0, static_cast<int>(std::ceil(std::log2(norm(a) + 1e-300))) + 4);
  a = std::ldexp(1.0, -squarings) * a;
  Matrix sum(a.rows, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i) sum(i, i) = 1;
  Matrix term = sum;
  for (int n = 1; n <= 16; ++n) {
    term = 1.0 / n * (term * a);
    sum = sum + term;
  }
  for (int n = 0; n < squarings; ++n) sum = sum * sum;
  return sum;
}

// Returns the solution of the equation in S and a constant: d/dτ [S; I] = [−k κᵀ, k vᵀ; 0, 0] [S; I], with [S; I] of
// K + V rows.
Matrix solution(const Token& token) {
  const std::int64_t keys = token.k.rows, values = token.v.rows;
  Matrix generator(keys + values, keys + values);
  const Matrix erase = token.k * transpose(token.erase_key), write = token.k * transpose(token.v);
  for (std::int64_t i = 0; i < keys; ++i) {
    for (std::int64_t j = 0; j < keys; ++j) generator(i, j) = -token.beta * erase(i, j);
    for (std::int64_t j = 0; j < values; ++j) generator(i, keys + j) = token.beta * write(i, j);
  }
  const Matrix flow = exponential(generator);
  Matrix result(keys, values);
  for (std::int64_t i = 0; i < keys; ++i) {
    for (std::int64_t j = 0; j < values; ++j) {
      result(i, j) = flow(i, keys + j);
      for (std::int64_t n = 0; n < keys; ++n) result(i, j) += flow(i, n) * token.state(n, j);
    }
  }
  return result;
}

TEST(StepSizeProperty, ExactIsTheMatrixExponential) {
  for (const double x : {1e-9, 1e-3, 0.3, 1.0, 5.0, 40.0}) {
    const Token token(x, 0.7);
    EXPECT_LE(distance(token.after("exact"), solution(token)), 1e-12) << "x = " << x;
  }
}

TEST(StepSizeProperty, ExactWithTwoKeysIsTheMatrixExponential) {
  for (const double x : {-20.0, -1.0, -1e-3, 1e-12, 1e-9, 1e-3, 0.3, 1.0, 5.0, 40.0}) {
    const Token token = Token::with_two_keys(x, 0.7);
    EXPECT_LE(distance(token.after("exact"), solution(token)), 1e-12) << "x = " << x;
  }
}

// Where κ is orthogonal to k, −k κᵀ is nilpotent and every step is Euler's.
TEST(StepSizeProperty, KeysThatAreOrthogonalShear) {
  Token token = Token::with_two_keys(1, 0.7);
  token.orthogonalise_keys();
  const Matrix expected = token.state + token.beta * token.slope(token.state);
  for (const char* step : {"euler", "rk3", "exact", "implicit_euler", "trapezoid"}) {
    EXPECT_LE(distance(token.after(step), expected), 1e-14) << step;
  }
}

void expect_stages(const Token& token) {
  const double h = token.beta;
  const Matrix& s = token.state;
  const Matrix k1 = token.slope(s);
  const Matrix k2 = token.slope(s + h / 2 * k1);
  const Matrix k3 = token.slope(s + h / 2 * k2);
  const Matrix k4 = token.slope(s + h * k3);
  EXPECT_LE(distance(token.after("euler"), s + h * k1), 1e-14);
  EXPECT_LE(distance(token.after("rk1"), s + h * k1), 1e-14);
  EXPECT_LE(distance(token.after("rk2"), s + h * k2), 1e-14);
  EXPECT_LE(distance(token.after("rk4"), s + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)), 1e-14);
}

TEST(StepSizeProperty, RungeKuttaStepsAreTheirStages) {
  expect_stages(Token(1.7, 0.9));
  expect_stages(Token::with_two_keys(1.7, 0.9));
  expect_stages(Token::with_two_keys(-0.8, 0.9));
}

// rk(N) is the Taylor polynomial of order N of S in time: S⁽¹⁾ = f(S), S⁽ⁿ⁺¹⁾ = −k kᵀ S⁽ⁿ⁾.
TEST(StepSizeProperty, RungeKuttaOfAnyOrderIsTheTaylorPolynomial) {
  const Token token(1.3, 0.6);
  Matrix sum = token.state, term = token.beta * token.slope(token.state);
  for (int order = 1; order <= 12; ++order) {
    sum = sum + term;
    EXPECT_LE(distance(token.after("rk" + std::to_string(order)), sum), 1e-14) << order;
    term = -token.beta / (order + 1) * (token.k * (transpose(token.k) * term));
  }
}

TEST(StepSizeProperty, ImplicitStepsSolveTheirEquations) {
  for (const double x : {1e-6, 0.5, 3.0, 1e4}) {
    for (const Token& token : {Token(x, 0.8), Token::with_two_keys(x, 0.8)}) {
      // |κ| |k| β, which is x with one key.
      const double size = token.beta * norm(token.erase_key) * norm(token.k);
      const Matrix euler = token.after("implicit_euler");
      EXPECT_LE(norm(euler - token.state - token.beta * token.slope(euler)), 1e-14 * (1 + size) * norm(euler)) << x;
      const Matrix trapezoid = token.after("trapezoid");
      const Matrix mean = 0.5 * (token.slope(token.state) + token.slope(trapezoid));
      EXPECT_LE(norm(trapezoid - token.state - token.beta * mean), 1e-14 * (1 + size) * norm(trapezoid)) << x;
    }
  }
}

TEST(StepSizeProperty, ImplicitStepsAreEulersWhereTheKeysPointApart) {
  for (const double x : {-1e-3, -1.0, -2.0, -50.0}) {
    const Token token = Token::with_two_keys(x, 0.8);
    for (const char* step : {"implicit_euler", "trapezoid"}) {
      EXPECT_EQ(distance(token.after(step), token.after("euler")), 0) << step << ' ' << x;
    }
  }
}

TEST(StepSizeProperty, RungeKuttaTendsToExactAsItsOrderGrows) {
  const Token token(2.0, 0.9);
  const Matrix exact = token.after("exact");
  double before = 1e300;
  for (int order = 2; order <= 16; ++order) {
    const double error = distance(token.after("rk" + std::to_string(order)), exact);
    EXPECT_LT(error, before / 1.5) << order;
    before = error;
  }
  EXPECT_LE(distance(token.after("rk24"), exact), 1e-14);
}

// The factor by which a token with v = 0 multiplies a state along k.
double eigenvalue(const std::string& step, double x) {
  Token token(x, 0.8, 4, 1);
  token.v = 0 * token.v;
  token.state = token.k;
  const Matrix after = token.after(step);
  const double value = (transpose(token.k) * after)(0, 0) / (transpose(token.k) * token.k)(0, 0);
  EXPECT_LE(norm(after - value * token.k), 1e-14 * (1 + std::abs(value)) * norm(token.k)) << step << ' ' << x;
  return value;
}

TEST(StepSizeProperty, EigenvaluesAlongTheKey) {
  const double rounding = 4e-16;
  for (const double x : {1e-8, 1e-3, 0.1, 0.5, 1.0, 1.9, 2.5, 7.0, 50.0, 1e4, 1e8}) {
    EXPECT_NEAR(eigenvalue("exact", x), std::exp(-x), rounding);
    EXPECT_LE(std::abs(eigenvalue("exact", x)), 1.0) << x;
    EXPECT_NEAR(eigenvalue("euler", x), 1 - x, rounding * (1 + x));
    EXPECT_NEAR(eigenvalue("implicit_euler", x), 1 / (1 + x), rounding);
    EXPECT_NEAR(eigenvalue("trapezoid", x), (1 - x / 2) / (1 + x / 2), rounding * 2);
    EXPECT_NEAR(eigenvalue("rk2", x), 1 - x + x * x / 2, rounding * (1 + x) * (1 + x));
    if (x < 30) {
      EXPECT_GT(eigenvalue("exact", x), 0) << x;
    }
    EXPECT_GE(eigenvalue("implicit_euler", x), 0) << x;
    EXPECT_LE(std::abs(eigenvalue("trapezoid", x)), 1.0) << x;
  }
  // Where Runge and Kutta's steps stop being stable: x = 2 for order 2, 2.7853 for order 4.
  EXPECT_LE(std::abs(eigenvalue("rk2", 1.99)), 1);
  EXPECT_GT(std::abs(eigenvalue("rk2", 2.01)), 1);
  EXPECT_LE(std::abs(eigenvalue("rk4", 2.785)), 1);
  EXPECT_GT(std::abs(eigenvalue("rk4", 2.786)), 1);
}

}  // namespace
}  // namespace efla::test
