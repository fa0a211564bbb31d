// Every implementation of the gated linear unit against float64, on every SIMD target of this machine.
#include "efla/ops/layers/glu.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/cpu/common/target.h"
#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"

namespace efla {
namespace {

class GluOnTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { cpu::use_target(GetParam()); }
  void TearDown() override { cpu::use_target(""); }
};

TEST_P(GluOnTarget, IsTheFloat64ProductWithTheSameBitsForAnyThreads) {
  Random random(3);
  for (const auto activation : {GateActivation::silu, GateActivation::sigmoid}) {
    for (const std::int64_t n : {1, 5, 700}) {
      for (const std::int64_t d : {1, 7, 33, 64}) {
        std::vector<float> x(n * d), gate(n * d), y(n * d), threaded(n * d);
        for (auto& value : x) value = static_cast<float>(random.normal());
        for (auto& value : gate) value = 4.0F * static_cast<float>(random.normal());
        const auto view = [&](auto& data) { return View<float, 2>::contiguous(data.data(), {n, d}); };
        ThreadPool one(1), two(2);
        glu_forward<float>({view(gate), view(x), view(y), activation}, {"auto", {.pool = &one}});
        glu_forward<float>({view(gate), view(x), view(threaded), activation}, {"auto", {.pool = &two}});
        EXPECT_EQ(y, threaded);
        for (std::size_t i = 0; i < y.size(); ++i) {
          const double z = gate[i], sigma = 1.0 / (1.0 + std::exp(-z));
          const double expected = x[i] * (activation == GateActivation::silu ? z * sigma : sigma);
          ASSERT_NEAR(y[i], expected, 1e-6 * std::abs(expected) + 1e-37);
        }
      }
    }
  }
}

TEST_P(GluOnTarget, ANanStaysNan) {
  for (const auto activation : {GateActivation::silu, GateActivation::sigmoid}) {
    std::vector<float> x(9, 1.0F), gate(9, std::nanf("")), y(9);
    const auto view = [](auto& data) { return View<float, 2>::contiguous(data.data(), {1, 9}); };
    glu_forward<float>({view(gate), view(x), view(y), activation});
    for (const float value : y) EXPECT_TRUE(std::isnan(value));
  }
}

TEST(Glu, RefusesWhatDoesNotFit) {
  std::vector<float> data(6);
  const auto x = View<float, 2>::contiguous(data.data(), {2, 3}),
             gate = View<float, 2>::contiguous(data.data(), {3, 2});
  test::expect_error([&] { glu_forward<float>({gate, x, x}); }, "up", "got shape [2, 3], expected shape [3, 2]");
}

INSTANTIATE_TEST_SUITE_P(Targets, GluOnTarget, testing::ValuesIn(cpu::supported_targets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace efla
