// Every implementation of RMS normalisation against float64, on every SIMD target of this machine.
#include "efla/ops/layers/rms_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/cpu/common/target.h"
#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"
#include "tests/support/relative_error.h"
#include "tests/support/tensor.h"

namespace efla {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// [N, D] with rows further apart than D, filled with NaN.
template <class T>
struct Rows {
  std::vector<T> data;
  std::int64_t rows, columns, stride;

  Rows(std::int64_t n, std::int64_t d, std::int64_t padding)
      : data(n * (d + padding), test::rounded<T>(kPoison)), rows(n), columns(d), stride(d + padding) {}
  void randomise(Random& random) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const double scale = std::exp(2 * random.normal());
      for (std::int64_t c = 0; c < columns; ++c) data[row * stride + c] = test::rounded<T>(scale * random.normal());
    }
  }
  View<T, 2> view() { return {data.data(), {rows, columns}, {stride, 1}}; }
  double operator()(std::int64_t row, std::int64_t c) const { return to_float(data[row * stride + c]); }
};

template <class T>
struct Case {
  Random random{3};
  Rows<T> x, y, dy, dx;
  std::vector<float> weight, dweight;

  Case(std::int64_t n, std::int64_t d)
      : x(n, d, 5), y(n, d, 3), dy(n, d, 0), dx(n, d, 8), weight(d), dweight(d, kPoison) {
    x.randomise(random);
    dy.randomise(random);
    for (auto& w : weight) w = static_cast<float>(random.normal());
  }
  void run(int threads, bool weighted, const std::string& implementation = "auto") {
    ThreadPool pool(threads);
    const RunOptions options{implementation, {.pool = &pool}};
    const std::int64_t d = x.columns;
    const auto w = View<const float, 1>::contiguous(weighted ? weight.data() : nullptr, {d});
    rms_norm_forward(RmsNormForward<T>{x.view(), w, kEps, y.view()}, options);
    const auto dw = View<float, 1>::contiguous(weighted ? dweight.data() : nullptr, {d});
    rms_norm_backward(RmsNormBackward<T>{x.view(), w, kEps, dy.view(), dx.view(), dw}, options);
  }
  static constexpr float kEps = 1e-2F;
};

template <class T>
void check(const std::string& implementation, std::int64_t n, std::int64_t d, bool weighted, double tolerance) {
  SCOPED_TRACE(testing::Message() << implementation << " N " << n << " D " << d << " weighted " << weighted << ' '
                                  << cpu::target_name());
  Case<T> p(n, d);
  p.run(2, weighted, implementation);
  test::RelativeError y_error, dx_error, dweight_error;
  std::vector<double> dweight(d), dweight_terms(d);
  for (std::int64_t row = 0; row < n; ++row) {
    double square = 0, dot = 0, dot_terms = 0;
    const auto w = [&](std::int64_t c) { return weighted ? p.weight[c] : 1.0; };
    for (std::int64_t c = 0; c < d; ++c) {
      square += p.x(row, c) * p.x(row, c);
      dot += w(c) * p.dy(row, c) * p.x(row, c);
      dot_terms += std::abs(w(c) * p.dy(row, c) * p.x(row, c));
    }
    const double r = 1 / std::sqrt(square / d + Case<T>::kEps);
    for (std::int64_t c = 0; c < d; ++c) {
      const double y = p.x(row, c) * r * w(c), direct = w(c) * p.dy(row, c), pull = p.x(row, c) * r * r / d;
      y_error.add(p.y(row, c), y, y);
      dx_error.add(p.dx(row, c), r * (direct - pull * dot), r * (std::abs(direct) + std::abs(pull) * dot_terms));
      dweight[c] += p.dy(row, c) * p.x(row, c) * r;
      dweight_terms[c] += std::abs(p.dy(row, c) * p.x(row, c) * r);
    }
  }
  for (std::int64_t c = 0; c < d; ++c) dweight_error.add(p.dweight[c], dweight[c], dweight_terms[c]);
  EXPECT_LE(y_error.value(), tolerance);
  EXPECT_LE(dx_error.value(), tolerance);
  if (weighted) {
    EXPECT_LE(dweight_error.value(), 4e-7);
  }
}

TEST(RmsNorm, AgreesWithFloat64OnEveryTarget) {
  const auto check_sizes = [](const std::string& implementation) {
    for (const bool weighted : {true, false}) {
      for (const std::int64_t d : {2, 7, 16, 33, 64, 250}) {
        for (const std::int64_t n : {1, 3, 129, 700}) {
          check<float>(implementation, n, d, weighted, 4e-7);
          check<bfloat16>(implementation, n, d, weighted, 3e-3);
        }
      }
    }
  };
  for (const std::string& target : cpu::supported_targets()) {
    const test::OnTarget guard(target);
    for (const std::string& implementation : test::fast_rows(rms_norm_implementations())) check_sizes(implementation);
  }
  check_sizes("ref");
}

// The gate multiplies y, so that the gated gradients are those of the plain norm for dy·act(gate).
TEST(RmsNorm, GatesInEveryRow) {
  constexpr std::int64_t kRows = 5, kColumns = 37;
  const auto act = [](GateActivation activation, double z) {
    return (activation == GateActivation::silu ? z : 1.0) / (1 + std::exp(-z));
  };
  const auto check_row = [&](const std::string& implementation, GateActivation activation) {
    SCOPED_TRACE(testing::Message() << implementation << " activation " << static_cast<int>(activation) << ' '
                                    << cpu::target_name());
    Case<float> gated(kRows, kColumns), plain(kRows, kColumns);
    Rows<float> gate(kRows, kColumns, 4), dgate(kRows, kColumns, 2);
    gate.randomise(gated.random);
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t c = 0; c < kColumns; ++c) {
        plain.dy.view()(row, c) = static_cast<float>(gated.dy(row, c) * act(activation, gate(row, c)));
      }
    }
    plain.run(1, true, "ref");
    const auto weight = View<const float, 1>::contiguous(gated.weight.data(), {kColumns});
    const auto dweight = View<float, 1>::contiguous(gated.dweight.data(), {kColumns});
    rms_norm_forward(
        RmsNormForward<float>{gated.x.view(), weight, Case<float>::kEps, gated.y.view(), gate.view(), activation},
        {.implementation = implementation});
    rms_norm_backward(RmsNormBackward<float>{gated.x.view(), weight, Case<float>::kEps, gated.dy.view(),
                                             gated.dx.view(), dweight, gate.view(), activation, dgate.view()},
                      {.implementation = implementation});
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t c = 0; c < kColumns; ++c) {
        const double z = gate(row, c), h = 1e-6, y = plain.y(row, c);
        const double slope = (act(activation, z + h) - act(activation, z - h)) / (2 * h);
        EXPECT_NEAR(gated.y(row, c), y * act(activation, z), 2e-6 * (1 + std::abs(y * act(activation, z))));
        EXPECT_NEAR(gated.dx(row, c), plain.dx(row, c), 2e-6 * (1 + std::abs(plain.dx(row, c))));
        EXPECT_NEAR(dgate(row, c), gated.dy(row, c) * y * slope, 2e-6 * (1 + std::abs(gated.dy(row, c) * y)));
      }
    }
    for (std::int64_t c = 0; c < kColumns; ++c) {
      EXPECT_NEAR(gated.dweight[c], plain.dweight[c], 2e-6 * (1 + std::abs(plain.dweight[c])));
    }
  };
  for (const auto activation : {GateActivation::silu, GateActivation::sigmoid}) {
    check_row("ref", activation);
    for (const std::string& target : cpu::supported_targets()) {
      const test::OnTarget guard(target);
      for (const std::string& row : test::fast_rows(rms_norm_implementations())) check_row(row, activation);
    }
  }
}

TEST(RmsNorm, RefusesWhatDoesNotFit) {
  using test::expect_error;
  Case<float> p(3, 8);
  const RmsNormForward<float> good{p.x.view(), {}, 1e-6F, p.y.view()};
  RmsNormForward<float> bad = good;
  bad.eps = 0;
  expect_error([&] { rms_norm_forward(bad); }, "eps", "got 0, expected a positive number");
  bad = good;
  bad.weight = View<const float, 1>::contiguous(p.weight.data(), {7});
  expect_error([&] { rms_norm_forward(bad); }, "weight", "got shape [7], expected shape [8]");
  bad = good;
  bad.y.data = nullptr;
  expect_error([&] { rms_norm_forward(bad); }, "y", "got nothing");
  bad = good;
  bad.x.stride[1] = 2;
  expect_error([&] { rms_norm_forward(bad); }, "implementation", "side by side");
  EXPECT_EQ(rms_norm_forward(good).implementation, "simd");
}

TEST(RmsNorm, GivesTheSameBitsForAnyNumberOfThreads) {
  Case<float> one(1000, 64), many(1000, 64);
  one.run(1, true);
  many.run(3, true);
  const auto same = [](const auto& a, const auto& b) {
    return !std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0]));
  };
  EXPECT_TRUE(same(one.y.data, many.y.data));
  EXPECT_TRUE(same(one.dx.data, many.dx.data));
  EXPECT_TRUE(same(one.dweight, many.dweight));
}

}  // namespace
}  // namespace efla
