// The lengths of drafts by the model's head, in simulated time.
#include "efla/engine/head_drafts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>

#include "efla/base/random.h"

namespace efla::engine {
namespace {

constexpr std::int64_t kMost = 7, kTokens = 600;

// Returns the tokens per time that drafts of n tokens give, in tokens per step without drafts.
double rate_of(std::int64_t n, double p, double cost) {
  double tokens = 0.0;
  for (std::int64_t i = 0; i <= n; ++i) tokens += std::pow(p, i);
  return tokens / (1 + static_cast<double>(n) * cost);
}

// Decodes replies whose drafted tokens are right with probability p and take `cost` steps. Returns the rate.
double simulated(double p, double cost, double noise) {
  Random random(7);
  DraftCost learned;
  std::int64_t tokens = 0;
  double time = 0.0;
  for (int reply = 0; reply < 4; ++reply) {
    HeadDrafts drafts;
    for (const std::int64_t end = tokens + kTokens; tokens < end;) {
      const std::int64_t drafted = drafts.next(kMost, learned.per_token(1));
      const double step = 1 + static_cast<double>(drafted) * cost;
      time += step;
      learned.learn(1, drafted, std::chrono::duration<double>(step * (1 + noise * random.uniform())));
      std::int64_t right = 0;
      while (right < drafted && random.uniform() < p) ++right;
      if (drafted > 0) drafts.end(static_cast<std::size_t>(right), static_cast<std::size_t>(drafted));
      tokens += right + 1;
    }
  }
  return static_cast<double>(tokens) / time;
}

TEST(HeadDrafts, AreNeverMuchSlowerThanNoneAndNearlyAsFastAsTheBestLength) {
  for (const double p : {0.0, 0.2, 0.5, 0.8, 1.0}) {
    for (const double cost : {0.05, 0.3, 0.6, 1.0}) {
      for (const double noise : {0.0, 0.3}) {
        double best = 1.0;
        for (std::int64_t n = 1; n <= kMost; ++n) best = std::max(best, rate_of(n, p, cost));
        const double rate = simulated(p, cost, noise);
        SCOPED_TRACE(testing::Message() << "p " << p << ", cost " << cost << ", noise " << noise);
        EXPECT_GT(rate, 0.96);
        EXPECT_GT(rate, 0.85 * best);
      }
    }
  }
}

TEST(HeadDrafts, BeginAgainWhenTheHeadIsRightAgain) {
  HeadDrafts drafts;
  std::int64_t steps = 0;
  for (int i = 0; i < 200; ++i) {
    if (drafts.next(kMost, 0.3) > 0) drafts.end(0, 1);
  }
  for (std::int64_t drafted = 0; drafted < kMost; ++steps) {
    ASSERT_LT(steps, 1000);
    drafted = drafts.next(kMost, 0.3);
    if (drafted > 0) drafts.end(static_cast<std::size_t>(drafted), static_cast<std::size_t>(drafted));
  }
}

TEST(DraftCost, StepsWithoutDraftsAreMeasuredFirstAndNowAndThen) {
  DraftCost cost;
  const auto seconds = [](double s) { return std::chrono::duration<double>(s); };
  EXPECT_TRUE(std::isinf(cost.per_token(2)));
  cost.learn(2, 0, seconds(9.0));  // a first step that is slow
  EXPECT_TRUE(std::isinf(cost.per_token(2)));
  cost.learn(2, 0, seconds(1.0));
  EXPECT_TRUE(std::isfinite(cost.per_token(2)));
  EXPECT_TRUE(std::isinf(cost.per_token(1))) << "other texts together";
  std::int64_t drafts = 0;
  while (std::isfinite(cost.per_token(2))) {
    if (drafts > 0) {
      EXPECT_NEAR(cost.per_token(2), 0.5, 1e-12);
    }
    ASSERT_LT(++drafts, 1000);
    cost.learn(2, 4, seconds(3.0));
  }
  cost.learn(2, 0, seconds(1.0));
  EXPECT_NEAR(cost.per_token(2), 0.5, 1e-12);
}

}  // namespace
}  // namespace efla::engine
