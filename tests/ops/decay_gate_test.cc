// The reference of the decay gate against its equations and at their limits.
#include "efla/ops/layers/decay_gate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/expect_error.h"

namespace efla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
View<T, 2> row_of(std::vector<T>& data) {
  return View<T, 2>::contiguous(data.data(), {1, static_cast<std::int64_t>(data.size())});
}
template <class T>
View<T, 1> vector_of(std::vector<T>& data) {
  return View<T, 1>::contiguous(data.data(), {static_cast<std::int64_t>(data.size())});
}

// One row of one head of rate 2, without a bias.
struct GateRow {
  std::vector<float> z, bias, a_log{std::log(2.0F)}, g, dg, dz, dbias, da_log{0};

  explicit GateRow(std::vector<float> given)
      : z(std::move(given)), bias(z.size()), g(bias), dg(bias), dz(bias), dbias(bias) {
    for (auto& e : dg) e = 1;
  }
  DecayGateForward<float> forward(DecayActivation activation) {
    return {row_of(z), vector_of(bias), vector_of(a_log), activation, -5.0F, row_of(g)};
  }
  DecayGateBackward<float> backward(DecayActivation activation) {
    return {row_of(z),  vector_of(bias), vector_of(a_log), activation,       -5.0F,
            row_of(dg), row_of(dz),      vector_of(dbias), vector_of(da_log)};
  }
  void run(DecayActivation activation) {
    decay_gate_forward(forward(activation), {.implementation = "ref"});
    decay_gate_backward(backward(activation), {.implementation = "ref"});
  }
};

TEST(DecayGate, IsItsEquations) {
  GateRow row({-3, -0.5F, 0, 1, 4});
  row.run(DecayActivation::softplus);
  double sum = 0;
  for (std::size_t i = 0; i < row.z.size(); ++i) {
    const double g = -2 * std::log(1 + std::exp(row.z[i]));
    EXPECT_NEAR(row.g[i], g, 1e-6 * std::abs(g));
    EXPECT_NEAR(row.dz[i], -2 / (1 + std::exp(-row.z[i])), 1e-6);
    EXPECT_EQ(row.dbias[i], row.dz[i]);
    sum += g;
  }
  EXPECT_NEAR(row.da_log[0], sum, 1e-5);
  row.run(DecayActivation::sigmoid);
  sum = 0;
  for (std::size_t i = 0; i < row.z.size(); ++i) {
    const double sigma = 1 / (1 + std::exp(-2.0 * row.z[i])), dz = -10 * sigma * (1 - sigma);
    EXPECT_NEAR(row.g[i], -5 * sigma, 1e-6);
    EXPECT_NEAR(row.dz[i], dz, 1e-6);
    sum += dz * row.z[i];
  }
  EXPECT_NEAR(row.da_log[0], sum, 1e-5);
}

TEST(DecayGate, ApproachesItsLimits) {
  const std::vector<float> ends{-kInfinity, -3e38F, -1000, 1000, 3e37F, kInfinity};
  GateRow row(ends);
  row.run(DecayActivation::softplus);
  EXPECT_EQ(row.g, (std::vector<float>{0, 0, 0, -2000, -6e37F, -kInfinity}));
  EXPECT_EQ(row.dz, (std::vector<float>{0, 0, 0, -2, -2, -2}));
  row.run(DecayActivation::sigmoid);
  EXPECT_EQ(row.g, (std::vector<float>{0, 0, 0, -5, -5, -5}));
  EXPECT_EQ(row.dz, std::vector<float>(6, 0));
}

// Also in float64, where exp(a_log) overflows above 709.
TEST(DecayGate, ARateThatOverflowsTimesASoftplusThatUnderflowsIsTheirProduct) {
  for (const float a_log : {100.0F, 1000.0F}) {
    GateRow row({-2.5F * a_log, -a_log - 3, -a_log + 2, -1, 0, 1});
    row.a_log = {a_log};
    row.run(DecayActivation::softplus);
    const std::vector<float> g{0, -std::exp(-3.0F), -std::exp(2.0F)};
    for (std::size_t i = 0; i < g.size(); ++i) {
      EXPECT_FLOAT_EQ(row.g[i], g[i]) << a_log << ' ' << i;
      EXPECT_FLOAT_EQ(row.dz[i], g[i]) << a_log << ' ' << i;
    }
    for (std::size_t i = g.size(); i < row.g.size(); ++i) EXPECT_EQ(std::exp(row.g[i]), 0) << a_log << ' ' << i;
    for (auto& dg : row.dg) dg = 0;  // because e^g is 0
    row.run(DecayActivation::softplus);
    EXPECT_EQ(row.dz, std::vector<float>(6, 0)) << a_log;
    EXPECT_EQ(row.da_log[0], 0) << a_log;
    row.run(DecayActivation::sigmoid);
    EXPECT_EQ(row.g, (std::vector<float>{0, 0, 0, 0, -2.5F, -5})) << a_log;
  }
}

TEST(DecayGate, NanStaysNan) {
  for (const auto activation : {DecayActivation::softplus, DecayActivation::sigmoid}) {
    GateRow row({0, std::nanf("")});
    row.run(activation);
    EXPECT_TRUE(std::isnan(row.g[1]) && std::isnan(row.dz[1]) && std::isnan(row.dbias[1]));
    EXPECT_TRUE(std::isfinite(row.g[0]) && std::isfinite(row.dz[0]) && std::isfinite(row.dbias[0]));
  }
}

TEST(DecayGate, RefusesWhatDoesNotFit) {
  GateRow row({0, 1, 2, 3});
  const auto softplus = DecayActivation::softplus, sigmoid = DecayActivation::sigmoid;
  std::vector<float> three(3);
  const auto refuses = [](const auto& problem, const char* argument, const char* says) {
    test::expect_error([&] { decay_gate_forward(problem, {.implementation = "ref"}); }, argument, says);
  };
  auto p = row.forward(softplus);
  p.bias = vector_of(three);
  refuses(p, "bias", "got shape [3], expected shape [4]");
  p = row.forward(softplus);
  p.a_log = vector_of(three);
  refuses(p, "columns of z", "got 4, expected a multiple of the 3 heads of a_log");
  p.a_log = {};
  refuses(p, "heads HV", "got 0");
  p = row.forward(softplus);
  p.g = row_of(three);
  refuses(p, "g", "got shape [1, 3], expected shape [1, 4]");
  p = row.forward(sigmoid);
  p.bound = 0;
  refuses(p, "bound", "got 0, expected a negative number");
  auto back = row.backward(softplus);
  back.da_log = vector_of(three);
  test::expect_error([&] { decay_gate_backward(back, {.implementation = "ref"}); }, "da_log",
                     "got shape [3], expected shape [1]");
}

}  // namespace
}  // namespace efla
