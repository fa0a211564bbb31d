#include "efla/data/digits.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"

namespace efla::data {
namespace {

constexpr std::size_t kPixels = 784;

std::span<const std::uint8_t> image(const ImageSet& set, std::size_t i) {
  return std::span(set.pixels).subspan(i * kPixels, kPixels);
}

TEST(BuiltinDigits, DependOnSplitSeedAndIndexAlone) {
  const auto set = builtin_digits(Split::train, 200, 3);
  const auto again = builtin_digits(Split::train, 200, 3);
  EXPECT_EQ(set.pixels, again.pixels);
  EXPECT_EQ(set.labels, again.labels);
  const auto fewer = builtin_digits(Split::train, 137, 3);
  EXPECT_TRUE(std::equal(fewer.pixels.begin(), fewer.pixels.end(), set.pixels.begin()));
  EXPECT_TRUE(std::equal(fewer.labels.begin(), fewer.labels.end(), set.labels.begin()));
  for (const auto& other : {builtin_digits(Split::test, 200, 3), builtin_digits(Split::train, 200, 4)}) {
    EXPECT_NE(other.labels, set.labels);
    for (std::size_t i = 0; i < 200; ++i) {
      for (std::size_t j = 0; j < 200; ++j) {
        ASSERT_FALSE(std::ranges::equal(image(other, i), image(set, j))) << i << " " << j;
      }
    }
  }
}

TEST(BuiltinDigits, HoldEachClassOnceInTenAndInRandomOrder) {
  const auto set = builtin_digits(Split::train, 1000);
  std::array<int, 10> first{};
  for (std::size_t block = 0; block < 100; ++block) {
    std::vector<int> labels(set.labels.begin() + static_cast<std::ptrdiff_t>(10 * block),
                            set.labels.begin() + static_cast<std::ptrdiff_t>(10 * block + 10));
    ++first[static_cast<std::size_t>(labels[0])];
    std::ranges::sort(labels);
    EXPECT_EQ(labels, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  }
  for (const auto n : first) EXPECT_LT(n, 30);
}

TEST(BuiltinDigits, LookLikeMnist) {
  constexpr std::size_t kCount = 3000;
  const auto set = builtin_digits(Split::train, kCount);
  ASSERT_EQ(set.rows, 28);
  ASSERT_EQ(set.cols, 28);
  ASSERT_EQ(set.pixels.size(), kCount * kPixels);
  double ink = 0.0;
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto pixels = image(set, i);
    double sum = 0.0, row = 0.0, column = 0.0;
    for (std::size_t p = 0; p < kPixels; ++p) {
      sum += pixels[p];
      row += pixels[p] * static_cast<double>(p / 28);
      column += pixels[p] * static_cast<double>(p % 28);
    }
    ink += sum;
    // A pen of some strength wrote something, not everywhere, and near the middle.
    EXPECT_GE(*std::ranges::max_element(pixels), 160) << i;
    EXPECT_GT(std::ranges::count_if(pixels, [](auto x) { return x > 80; }), 12) << i;
    EXPECT_LT(std::ranges::count_if(pixels, [](auto x) { return x > 0; }), 400) << i;
    EXPECT_LT(std::abs(row / sum - 13.5), 3.5) << i;
    EXPECT_LT(std::abs(column / sum - 13.5), 3.5) << i;
    // Nothing is cut off at the border.
    for (std::size_t k = 0; k < 28; ++k) {
      for (const auto p : {k, kPixels - 28 + k, 28 * k, 28 * k + 27}) EXPECT_LT(pixels[p], 255) << i;
    }
  }
  // MNIST's mean pixel is 33.3 of 255.
  EXPECT_NEAR(ink / (kCount * kPixels), 32.0, 4.0);
}

// The share of test digits whose nearest of the training digits has their label.
TEST(BuiltinDigits, CanBeLearnedButAreNotTrivial) {
  constexpr std::size_t kTrain = 2000, kTest = 300;
  const auto train = builtin_digits(Split::train, kTrain);
  const auto test = builtin_digits(Split::test, kTest);
  std::size_t right = 0;
  for (std::size_t i = 0; i < kTest; ++i) {
    std::size_t nearest = 0;
    auto best = std::numeric_limits<int>::max();
    for (std::size_t j = 0; j < kTrain; ++j) {
      const auto *a = image(test, i).data(), *b = image(train, j).data();
      int distance = 0;
      for (std::size_t p = 0; p < kPixels; ++p) distance += (a[p] - b[p]) * (a[p] - b[p]);
      if (distance < best) best = distance, nearest = j;
    }
    right += train.labels[nearest] == test.labels[i];
  }
  const double accuracy = static_cast<double>(right) / kTest;
  EXPECT_GT(accuracy, 0.88);
  EXPECT_LT(accuracy, 0.995);
}

TEST(BuiltinDigits, RefuseAbsurdCounts) {
  EXPECT_EQ(builtin_digits(Split::test, 0).count, 0);
  test::expect_error([] { builtin_digits(Split::test, -1); }, "count", "got -1, expected 0 to 100000000");
  test::expect_error([] { builtin_digits(Split::test, 1LL << 60); }, "count", "expected 0 to");
}

}  // namespace
}  // namespace efla::data
