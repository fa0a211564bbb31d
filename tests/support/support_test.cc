// The comparator of the reference tests (tests/support/compare.h) and its tensors: what they must not let pass.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/tensor.h"

namespace efla::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Tolerance kTolerance{"", 1e-6, 1e-3, 1e-2};
const std::vector<double> kExpected{1, -2, 3, -4};

bool accepts(const std::vector<double>& got, const std::vector<double>& plain = kExpected,
             const std::vector<double>& expected = kExpected) {
  return disagreement(got, expected, plain, kTolerance).empty();
}

TEST(Compare, AcceptsWhatIsNear) {
  EXPECT_TRUE(accepts(kExpected));
  EXPECT_TRUE(accepts({1 + 1e-6, -2, 3, -4}));
  EXPECT_TRUE(accepts({0, 0}, {0, 0}, {0, 0}));
  EXPECT_TRUE(accepts({}, {}, {}));
}

TEST(Compare, RefusesWhatIsNoNumber) {
  EXPECT_FALSE(accepts({1, -2, kNan, -4}));
  EXPECT_FALSE(accepts({kNan, kNan, kNan, kNan}));
  EXPECT_FALSE(accepts({1, -2, kInfinity, -4}));
  EXPECT_FALSE(accepts({1, -2, 3, -kInfinity}));
  EXPECT_FALSE(accepts({kInfinity}, {kInfinity}, {kInfinity}));
  EXPECT_FALSE(accepts({kNan}, {kNan}, {kNan}));
  EXPECT_FALSE(accepts(kExpected, kExpected, {1, -2, 3, kNan}));
}

TEST(Compare, RefusesSignsShapesAndZeros) {
  EXPECT_FALSE(accepts({-1, 2, -3, 4}));
  EXPECT_FALSE(accepts({1, -2, 3, 4}));
  EXPECT_FALSE(accepts({1, -2, 3}));
  EXPECT_FALSE(accepts({1, -2, 3, -4, 0}));
  EXPECT_FALSE(accepts({}));
  EXPECT_FALSE(accepts({0, 0, 0, 0}));
  EXPECT_FALSE(accepts({1e-30, 0}, {0, 0}, {0, 0}));
}

TEST(Compare, TheAllowanceFollowsThePlainAlgorithmUpToTheCap) {
  const std::vector<double> off{1, -2, 3, -4 * (1 + 1e-5)}, further{1, -2, 3, -4 * (1 + 1.9e-5)};
  EXPECT_FALSE(accepts(off));
  EXPECT_TRUE(accepts(further, off));
  EXPECT_FALSE(accepts({1, -2, 3, -4 * (1 + 3e-5)}, off));
  EXPECT_FALSE(accepts({1, -2, 3, -4.1}, {1, -2, 3, -4.1}));  // beyond the cap, as the plain one is
  EXPECT_FALSE(accepts(kExpected, {1, -2, 3, kNan}));
}

TEST(Compare, OneBadElementOfManyIsSeen) {
  std::vector<double> expected(1'000'000, 1.0), got = expected;
  got[777] = 1.02;  // a relative RMS error of 2e-5
  const Tolerance loose{"", 1e-4, 1e-3, 1e-2};
  const std::string why = disagreement(got, expected, expected, loose);
  EXPECT_NE(why.find("at element 777"), std::string::npos) << why;
}

TEST(Compare, EveryDtypeHasARow) {
  for (const char* kind : {"float32", "bfloat16 by chunks", "fading float32 by chunks"})
    EXPECT_EQ(tolerance_of(kind).kind, kind);
  EXPECT_THROW(tolerance_of("float23"), std::invalid_argument);
}

TEST(TestTensor, ShowsWritesBetweenTheRowsOfASlice) {
  Tensor<bfloat16, 4> tensor({1, 2, 2, 3}, Layout::sliced);
  tensor.view()(0, 0, 0, 2) = to_bfloat16(1);
  EXPECT_TRUE(tensor.sentinels_intact());
  *(&tensor.view()(0, 0, 0, 2) + 1) = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  EXPECT_FALSE(tensor.sentinels_intact());
}

TEST(TestTensor, ShowsWritesBesideItsElementsInEveryLayout) {
  for (const Layout layout :
       {Layout::contiguous, Layout::sliced, Layout::head_major, Layout::column_major, Layout::reversed}) {
    SCOPED_TRACE(name_of(layout));
    Tensor<float, 4> tensor({2, 3, 2, 5}, layout);
    EXPECT_TRUE(std::isnan(tensor.values().at(59)));
    std::vector<double> values;
    for (int i = 0; i < 60; ++i) values.push_back(i);
    tensor.assign(values);
    EXPECT_EQ(tensor.values(), values);
    EXPECT_EQ(tensor.view()(1, 2, 0, 3), 53);
    EXPECT_TRUE(tensor.sentinels_intact());
    Tensor<float, 4> other = tensor;
    EXPECT_TRUE(other.same_bits(tensor));
    other.view()(1, 0, 1, 4) += 1;
    EXPECT_FALSE(other.same_bits(tensor));
    const auto view = tensor.view();
    float* const first = layout == Layout::reversed ? &view(0, 2, 0, 0) : &view(0, 0, 0, 0);
    first[-1] = 0;
    EXPECT_FALSE(tensor.sentinels_intact());
  }
}

}  // namespace
}  // namespace efla::test
