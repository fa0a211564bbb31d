#include "bench/model/kernel_shares.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace efla::bench {
namespace {

using Seconds = std::map<std::string, double>;

TEST(KernelShares, AddTheKernelsOfAPart) {
  EXPECT_EQ(seconds_of_parts({{"a", 0.0, 1.0}, {"b", 1.0, 3.0}, {"a", 5.0, 6.0}}), (Seconds{{"a", 2.0}, {"b", 2.0}}));
  EXPECT_EQ(seconds_of_parts({}), Seconds{});
}

TEST(KernelShares, CountATimeInWhichKernelsOverlapOnce) {
  EXPECT_EQ(seconds_of_parts({{"b", 1.0, 4.0}, {"a", 0.0, 3.0}, {"c", 2.0, 5.0}}),
            (Seconds{{"a", 3.0}, {"b", 1.0}, {"c", 1.0}}));
  EXPECT_EQ(seconds_of_parts({{"a", 0.0, 8.0}, {"b", 1.0, 2.0}, {"c", 3.0, 9.0}}),
            (Seconds{{"a", 8.0}, {"b", 0.0}, {"c", 1.0}}));
}

}  // namespace
}  // namespace efla::bench
