// Rotary position embeddings against float64, and against long double for far positions.
#include "efla/ops/layers/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "efla/base/random.h"
#include "tests/support/attention_case.h"
#include "tests/support/compare.h"
#include "tests/support/expect_error.h"

namespace efla {
namespace {

using test::Layout;
using test::Tensor;

Tensor<float, 3> random_rows(std::int64_t n, std::int64_t heads, std::int64_t key_dim, Random& random, Layout layout) {
  Tensor<float, 3> x({n, heads, key_dim}, layout);
  x.assign(test::normal_numbers(n * heads * key_dim, random));
  return x;
}

RopeForward problem_of(Tensor<float, 3>& x, const std::vector<std::int64_t>& positions, std::int64_t rotary,
                       double theta, Tensor<float, 3>& y) {
  return {x.view(),
          View<const std::int64_t, 1>::contiguous(positions.data(), {static_cast<std::int64_t>(positions.size())}),
          rotary, theta, y.view()};
}

TEST(Rope, IsTheFloat64ResultInPlaceToo) {
  Random random(1);
  for (const auto layout : {Layout::contiguous, Layout::sliced, Layout::column_major, Layout::reversed}) {
    for (const std::int64_t n : {1, 3, 40}) {
      for (const std::int64_t key_dim : {1, 2, 7, 128, 256}) {
        for (const std::int64_t rotary : {std::int64_t{0}, key_dim / 8 * 2, key_dim / 2 * 2}) {
          Tensor<float, 3> x = random_rows(n, 3, key_dim, random, layout), y({n, 3, key_dim}), expected = y;
          std::vector<std::int64_t> positions;
          for (std::int64_t i = 0; i < n; ++i) positions.push_back(random.below(1'000'000));
          rope_forward(problem_of(x, positions, rotary, 1e7, expected), {"ref"});
          ThreadPool pool(2);
          rope_forward(problem_of(x, positions, rotary, 1e7, y), {"auto", {.pool = &pool}});
          EXPECT_EQ(test::disagreement(y.values(), expected.values(), expected.values(), test::tolerance_of("float32")),
                    "");
          EXPECT_TRUE(y.sentinels_intact());
          rope_forward(problem_of(x, positions, rotary, 1e7, x));
          EXPECT_EQ(x.values(), y.values());
          EXPECT_TRUE(x.sentinels_intact());
        }
      }
    }
  }
}

// The first pair turns by one radian per token, whatever theta is.
TEST(Rope, FarPositionsAreAsExactAsNearOnes) {
  for (const std::int64_t position : {0LL, 1LL, 4095LL, 1'000'000LL, 2'147'483'647LL}) {
    Tensor<float, 3> x({1, 1, 8}), y({1, 1, 8});
    x.assign({1, 1, 0, 0, 0, 0, 5, 6});
    rope_forward(problem_of(x, {position}, 6, 1e7, y));
    for (std::int64_t i = 0; i < 2; ++i) {
      const long double angle =
          static_cast<long double>(position) * std::pow(1e7L, -2.0L * static_cast<long double>(i) / 6);
      const double most = position <= 1'000'000 ? 4e-8 : 1e-6;
      EXPECT_NEAR(y.view()(0, 0, i), std::cos(angle), most) << position;
      EXPECT_NEAR(y.view()(0, 0, i + 3), std::sin(angle), most) << position;
    }
    EXPECT_EQ(y.view()(0, 0, 6), 5.0F);
    EXPECT_EQ(y.view()(0, 0, 7), 6.0F);
  }
}

TEST(Rope, ScoresDependOnTheDistanceAlone) {
  Random random(2);
  Tensor<float, 3> x = random_rows(2, 1, 64, random, Layout::contiguous), y({2, 1, 64});
  std::vector<double> scores;
  for (const std::int64_t begin : {0, 1, 777, 1'000'000}) {
    rope_forward(problem_of(x, {begin + 5, begin}, 64, 1e4, y));
    double score = 0;
    for (std::int64_t i = 0; i < 64; ++i) score += static_cast<double>(y.view()(0, 0, i)) * y.view()(1, 0, i);
    scores.push_back(score);
  }
  for (const double score : scores) EXPECT_NEAR(score, scores.front(), 1e-5);
}

TEST(Rope, RefusesWhatDoesNotFit) {
  Random random(3);
  Tensor<float, 3> x = random_rows(2, 3, 8, random, Layout::contiguous);
  const auto expect = [&](const char* argument, const char* says, const auto& change) {
    std::vector<std::int64_t> positions{1, 2};
    RopeForward p = problem_of(x, positions, 4, 1e4, x);
    change(p, positions);
    test::expect_error([&] { rope_forward(p); }, argument, says);
  };
  using Positions = std::vector<std::int64_t>;
  expect("rotary R", "got 3, expected an even number from 0 to K = 8",
         [](RopeForward& p, Positions&) { p.rotary = 3; });
  expect("rotary R", "got 10", [](RopeForward& p, Positions&) { p.rotary = 10; });
  expect("theta", "got 1, expected a finite number above 1", [](RopeForward& p, Positions&) { p.theta = 1.0; });
  expect("theta", "got inf, expected a finite number above 1", [](RopeForward& p, Positions&) { p.theta = INFINITY; });
  expect("positions", "got nothing, expected a tensor of shape [2]",
         [](RopeForward& p, Positions&) { p.positions = {}; });
  expect("positions[1]", "got -4, expected 0 or more", [](RopeForward&, Positions& positions) { positions[1] = -4; });
  expect("y", "got nothing", [](RopeForward& p, Positions&) { p.y = {}; });
}

}  // namespace
}  // namespace efla
