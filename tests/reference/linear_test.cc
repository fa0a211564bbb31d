// Every implementation of a linear layer against float64, on every SIMD target of this machine.
#include "efla/ops/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/cpu/common/target.h"
#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"

namespace efla {
namespace {

constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kGap = 3;  // floats between two rows, which nothing may read or write

struct Matrix {
  std::vector<float> data;
  std::int64_t rows, columns;

  Matrix(std::int64_t n, std::int64_t d) : data(n * (d + kGap), kUnwritten), rows(n), columns(d) {}
  Matrix(std::int64_t n, std::int64_t d, Random& random) : Matrix(n, d) {
    for (std::int64_t r = 0; r < n; ++r) {
      for (std::int64_t c = 0; c < d; ++c) at(r, c) = static_cast<float>(random.normal());
    }
  }
  float& at(std::int64_t r, std::int64_t c) { return data[r * (columns + kGap) + c]; }
  View<float, 2> view() { return {data.data(), {rows, columns}, {columns + kGap, 1}}; }
  View<const float, 2> const_view() { return {data.data(), {rows, columns}, {columns + kGap, 1}}; }
};

Matrix product(Matrix& x, Matrix& weight, int threads, const std::string& implementation = "auto") {
  Matrix y(x.rows, weight.rows);
  ThreadPool pool(threads);
  linear_forward({x.const_view(), weight.const_view(), y.view()}, {implementation, {.pool = &pool}});
  return y;
}

class LinearOnTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { cpu::use_target(GetParam()); }
  void TearDown() override { cpu::use_target(""); }
};

TEST_P(LinearOnTarget, IsTheFloat64Product) {
  Random random(7);
  for (const std::int64_t rows : {1, 2, 4, 5, 8}) {
    for (const std::int64_t n : {1, 3, 4, 7, 130}) {
      for (const std::int64_t d : {1, 7, 16, 100, 384}) {
        Matrix x(rows, d, random), weight(n, d, random);
        for (const std::string implementation : {"simd", "ref"}) {
          Matrix y = product(x, weight, 2, implementation);
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < n; ++c) {
              double expected = 0.0, size = 0.0;
              for (std::int64_t i = 0; i < d; ++i) {
                const double term = static_cast<double>(x.at(r, i)) * weight.at(c, i);
                expected += term;
                size += std::abs(term);
              }
              ASSERT_LE(std::abs(y.at(r, c) - expected), 1e-6 * size) << rows << " " << n << " " << d;
            }
            for (std::int64_t gap = 0; gap < kGap; ++gap) ASSERT_TRUE(std::isnan(y.at(r, n + gap)));
          }
        }
      }
    }
  }
}

TEST_P(LinearOnTarget, ARowHasTheSameBitsWhateverIsBesideItAndForAnyNumberOfThreads) {
  Random random(8);
  const std::int64_t n = 1317, d = 203;  // enough to be distributed
  Matrix x(7, d, random), weight(n, d, random), all = product(x, weight, 1), threaded = product(x, weight, 3);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    Matrix row(1, d);
    for (std::int64_t c = 0; c < d; ++c) row.at(0, c) = x.at(r, c);
    Matrix alone = product(row, weight, 2);
    for (std::int64_t c = 0; c < n; ++c) {
      ASSERT_EQ(alone.at(0, c), all.at(r, c));
      ASSERT_EQ(threaded.at(r, c), all.at(r, c));
    }
  }
}

TEST(Linear, RefusesWhatDoesNotFit) {
  Random random(9);
  Matrix x(2, 5, random), weight(3, 4, random), y(2, 3);
  test::expect_error(
      [&] {
        linear_forward({x.const_view(), weight.const_view(), y.view()});
      },
      "weight", "got shape [3, 4], expected shape [3, 5]");
  Matrix fitting(3, 5, random);
  EXPECT_EQ(linear_forward({x.const_view(), fitting.const_view(), y.view()}).implementation, "simd");
}

INSTANTIATE_TEST_SUITE_P(Targets, LinearOnTarget, testing::ValuesIn(cpu::supported_targets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace efla
