// The check of the benchmarks must be able to fail.
#include "bench/op/agreement.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace efla::bench {
namespace {

constexpr double kTolerance = 1e-5;

Outputs outputs(const at::Tensor& value) { return {{"o", value}}; }

at::Tensor ramp() { return at::arange(1, 13, at::kFloat).view({3, 4}); }

TEST(BenchAgreement, TellsTheRelativeError) {
  EXPECT_EQ(compare(outputs(ramp()), outputs(ramp()), kTolerance).error, 0.0);
  const Agreement near = compare(outputs(ramp() * 1.000004), outputs(ramp()), kTolerance);
  EXPECT_NEAR(near.error, 4e-6, 1e-7);
  EXPECT_EQ(near.fault, "");
  const Agreement far = compare(outputs(ramp() * 1.01), outputs(ramp()), kTolerance);
  EXPECT_NEAR(far.error, 0.01, 1e-4);
  EXPECT_EQ(far.fault, "o is off by 0.01, at most 1e-05");
}

TEST(BenchAgreement, RefusesWhatIsNotFinite) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    at::Tensor value = ramp();
    value.index_put_({1, 2}, bad);
    EXPECT_NE(compare(outputs(value), outputs(ramp()), kTolerance).fault, "") << bad;
    EXPECT_NE(compare(outputs(ramp()), outputs(value), kTolerance).fault, "") << bad;
    EXPECT_NE(compare(outputs(value), outputs(value), kTolerance).fault, "") << bad;
  }
}

TEST(BenchAgreement, RefusesAnotherSignShapeNameOrNumber) {
  EXPECT_NE(compare(outputs(-ramp()), outputs(ramp()), kTolerance).fault, "");
  EXPECT_NE(compare(outputs(ramp().t()), outputs(ramp()), kTolerance).fault, "");
  EXPECT_NE(compare({{"dq", ramp()}}, outputs(ramp()), kTolerance).fault, "");
  EXPECT_NE(compare({}, outputs(ramp()), kTolerance).fault, "");
  EXPECT_NE(compare(outputs(ramp()), outputs(at::zeros({3, 4})), kTolerance).fault, "");
}

}  // namespace
}  // namespace efla::bench
