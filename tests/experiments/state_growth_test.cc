// Every rule is bounded up to its limit of x = β‖k‖² and breaks above it (experiments/stability/README.md), in each
// precision.
#include "experiments/stability/state_growth.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace efla::experiments {
namespace {

constexpr Precision kPrecisions[] = {{}, {.bfloat16_inputs = true}, {.bfloat16_inputs = true, .bfloat16_state = true}};

const Stream& stream() {
  static const Stream s(2000, 1);
  return s;
}

HeadRun head(const std::string& step, double x, double beta, Keys keys, double erase_scale = 1) {
  HeadRun s{.lambda = x / beta, .beta = beta, .keys = keys};
  s.rule.step = parse_step_size(step);
  s.rule.step.erase_scale = erase_scale;
  return s;
}

void expect_limit(const std::string& step, double limit, double erase_scale = 1) {
  for (const double beta : {1.0, 0.25}) {
    for (const Keys keys : {Keys::repeated, Keys::random}) {
      for (const Precision& precision : kPrecisions) {
        SCOPED_TRACE(step + ", beta " + std::to_string(beta) + (keys == Keys::random ? ", random keys" : "") +
                     (precision.bfloat16_inputs ? ", bfloat16" : "") + (precision.bfloat16_state ? " state" : ""));
        const Growth below = grow(stream(), head(step, 0.97 * limit, beta, keys, erase_scale), precision);
        EXPECT_EQ(below.beyond, 0);
        EXPECT_LE(below.largest, 1000);
        // Random keys meet a direction once in K tokens: their growth is slower.
        const double above = keys == Keys::random ? 1.5 * limit : 1.05 * limit;
        EXPECT_GT(grow(stream(), head(step, above, beta, keys, erase_scale), precision).beyond, 0);
      }
    }
  }
}

TEST(StateGrowth, EulerBreaksAboveTwo) { expect_limit("euler", 2); }
TEST(StateGrowth, EulerThatErasesTwiceBreaksAboveOne) { expect_limit("euler", 1, 2); }
TEST(StateGrowth, RungeKuttaBreaksAboveItsLimit) {
  expect_limit("rk2", 2);
  expect_limit("rk4", 2.785293563405282);
}

TEST(StateGrowth, ExactAndImplicitStepsAreBoundedForAnyKey) {
  for (const char* step : {"exact", "implicit_euler", "trapezoid"}) {
    for (const double x : {0.25, 1.0, 2.0, 3.0, 100.0, 1e4, 1e8}) {
      for (const Keys keys : {Keys::repeated, Keys::random}) {
        for (const Precision& precision : kPrecisions) {
          const Growth growth = grow(stream(), head(step, x, 0.25, keys), precision);
          EXPECT_EQ(growth.not_finite, 0) << step << ' ' << x;
          EXPECT_LE(growth.largest, 1000) << step << ' ' << x;
        }
      }
    }
  }
}

// Multiplied by −1.5 at every token, a state passes the bound after about ln(bound)/ln 1.5 tokens and the largest
// float32 number after about ln(3.4e38)/ln 1.5.
TEST(StateGrowth, GrowsByTheEigenvalue) {
  const Growth growth = grow(stream(), head("euler", 2.5, 1, Keys::repeated), {});
  EXPECT_NEAR(static_cast<double>(growth.beyond), std::log(kGrowthBound) / std::log(1.5), 8);
  EXPECT_NEAR(static_cast<double>(growth.not_finite), std::log(3.4e38) / std::log(1.5), 8);
}

// I − 2 k kᵀ with a key of unit length that bfloat16 made longer, and the same key normalised by the operator.
TEST(StateGrowth, RoundedUnitKeysBreakReflections) {
  const Precision precision{.bfloat16_inputs = true};
  HeadRun reflection = head("euler", 1, 1, Keys::repeated, 2);
  double least = -1;
  for (std::int64_t direction = 0; direction < stream().tokens; ++direction) {
    const double value = eigenvalue(stream(), reflection, precision, direction);
    if (value >= least) continue;
    least = value;
    reflection.direction = direction;
  }
  ASSERT_LT(least, -1.005);
  EXPECT_GT(grow(stream(), reflection, precision).largest, 1e5);
  reflection.rule.qk_l2norm = true;
  EXPECT_LE(grow(stream(), reflection, precision).largest, 1000);
}

// Rounding a bfloat16 state puts errors across a repeated key, which nothing erases, and leaves the state along it
// exact to rounding.
TEST(StateGrowth, ErrorsOfRoundedStatesStayAcrossTheKey) {
  const HeadRun exact = head("exact", 1, 1, Keys::repeated);
  const Growth growth = grow(stream(), exact, {.bfloat16_inputs = true, .bfloat16_state = true});
  const std::vector<double> want = reference_state(stream(), exact, true);
  std::vector<double> along(kStateDim), want_along(kStateDim);  // rows of kᵀS
  for (std::int64_t i = 0; i < kStateDim; ++i) {
    for (std::int64_t j = 0; j < kStateDim; ++j) {
      along[j] += stream().directions[i] * growth.state[i * kStateDim + j];
      want_along[j] += stream().directions[i] * want[i * kStateDim + j];
    }
  }
  EXPECT_LE(relative_error(along, want_along), 0.004);
  EXPECT_GT(relative_error(growth.state, want), 0.02);
}

}  // namespace
}  // namespace efla::experiments
