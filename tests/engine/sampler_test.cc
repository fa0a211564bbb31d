// The sampler against probabilities computed directly from its definition.
#include "efla/engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/expect_error.h"

namespace efla::engine {
namespace {

using test::expect_error;

SeenIds seen_of(std::int64_t vocab, const std::vector<std::int64_t>& ids) {
  SeenIds seen(vocab);
  for (const auto id : ids) seen.add(id);
  return seen;
}

// The probability of each id: every step written out over the whole vocabulary.
std::vector<double> probabilities(const std::vector<float>& logits, const std::vector<std::int64_t>& seen,
                                  const SamplingOptions& options) {
  const std::size_t n = logits.size();
  std::vector<double> scores(logits.begin(), logits.end());
  for (const auto id : std::set<std::int64_t>(seen.begin(), seen.end())) {
    scores[id] = scores[id] < 0 ? scores[id] * options.repetition_penalty : scores[id] / options.repetition_penalty;
  }
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  const std::size_t k = options.top_k == 0 ? n : std::min<std::size_t>(n, options.top_k);
  double mass = 0.0;
  for (std::size_t i = 0; i < k; ++i) mass += std::exp(scores[order[i]] / options.temperature);
  std::vector<double> p(n, 0.0);
  double kept = 0.0;
  for (std::size_t i = 0; i < k && kept < options.top_p; ++i) {
    p[order[i]] = std::exp(scores[order[i]] / options.temperature) / mass;
    kept += p[order[i]];
  }
  for (double& x : p) x /= kept;
  return p;
}

std::vector<std::int64_t> counts_of(const std::vector<float>& logits, const std::vector<std::int64_t>& seen_ids,
                                    const SamplingOptions& options, int draws) {
  const auto seen = seen_of(static_cast<std::int64_t>(logits.size()), seen_ids);
  std::vector<std::int64_t> counts(logits.size(), 0);
  for (int draw = 0; draw < draws; ++draw) {
    Random random(11, draw);
    ++counts.at(sample(logits, seen, options, random));
  }
  return counts;
}

// Returns the value that χ² with `freedom` degrees of freedom exceeds once in a thousand times (Wilson and Hilferty's
// approximation, 1931).
double chi_square_limit(double freedom) {
  const double v = 2.0 / (9.0 * freedom);
  return freedom * std::pow(1.0 - v + 3.09 * std::sqrt(v), 3.0);
}

TEST(Sampler, DrawsTheDistributionOfItsDefinition) {
  constexpr int kDraws = 20'000;
  const std::vector<float> logits{0.5F, -1.0F, 2.0F, 1.25F, -0.25F, 2.0F, 0.0F, -3.0F, 1.0F, 0.75F};
  const std::vector<SamplingOptions> all{{.temperature = 1.0},
                                         {.temperature = 0.6},
                                         {.temperature = 2.5},
                                         {.temperature = 1.0, .top_k = 4},
                                         {.temperature = 1.0, .top_p = 0.8},
                                         {.temperature = 1.0, .repetition_penalty = 1.5},
                                         {.temperature = 1.3, .top_k = 6, .top_p = 0.9, .repetition_penalty = 0.7}};
  for (const auto& options : all) {
    const std::vector<std::int64_t> seen{2, 2, 4, 9};
    const auto p = probabilities(logits, seen, options);
    const auto counts = counts_of(logits, seen, options, kDraws);
    double chi_square = 0.0, freedom = -1.0;
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double expected = p[i] * kDraws;
      if (expected == 0.0) {
        EXPECT_EQ(counts[i], 0) << "id " << i;
        continue;
      }
      const double difference = static_cast<double>(counts[i]) - expected;
      chi_square += difference * difference / expected;
      freedom += 1.0;
    }
    EXPECT_LT(chi_square, chi_square_limit(freedom))
        << "T " << options.temperature << " k " << options.top_k << " p " << options.top_p;
  }
}

TEST(Sampler, TopPKeepsTheSmallestSet) {
  Random random(5);
  for (int trial = 0; trial < 200; ++trial) {
    // Few values, so that many are equal.
    std::vector<float> logits(20);
    for (float& x : logits) x = static_cast<float>(random.below(6)) / 2.0F;
    const double top_p = 0.05 + 0.9 * random.uniform();
    const auto p = probabilities(logits, {}, {.temperature = 1.0});
    const auto expected = probabilities(logits, {}, {.temperature = 1.0, .top_p = top_p});
    // That the expected set is the smallest: without its least probable id it falls short.
    double kept = 0.0, least = 1.0;
    for (std::size_t i = 0; i < p.size(); ++i) {
      if (expected[i] == 0.0) continue;
      kept += p[i];
      least = std::min(least, p[i]);
    }
    ASSERT_GE(kept, top_p - 1e-12);
    ASSERT_LT(kept - least, top_p + 1e-12);
    const auto counts = counts_of(logits, {}, {.temperature = 1.0, .top_p = top_p}, 300);
    for (std::size_t i = 0; i < p.size(); ++i) {
      EXPECT_TRUE(counts[i] == 0 || expected[i] > 0.0) << "trial " << trial << " id " << i;
    }
  }
}

TEST(Sampler, OfEqualLogitsTheLowestIdComesFirst) {
  const std::vector<float> equal(8, 1.5F);
  EXPECT_EQ(counts_of(equal, {}, {.temperature = 0.0}, 1)[0], 1);
  const auto first = [&](const SamplingOptions& options) {
    const auto counts = counts_of(equal, {}, options, 200);
    std::vector<std::size_t> ids;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] > 0) ids.push_back(i);
    }
    return ids;
  };
  EXPECT_EQ(first({.temperature = 1.0, .top_k = 3}), (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_EQ(first({.temperature = 1.0, .top_p = 0.5}), (std::vector<std::size_t>{0, 1, 2, 3}));
  EXPECT_EQ(first({.temperature = 1.0, .top_k = 4, .top_p = 0.5}), (std::vector<std::size_t>{0, 1}));
  EXPECT_EQ(first({.temperature = 1.0, .top_p = 0.0}), std::vector<std::size_t>{0});
}

TEST(Sampler, TheLargestOfManyLogitsIsFoundAnywhere) {
  constexpr std::size_t kIds = 1000;
  std::vector<float> logits(kIds);
  for (std::size_t i = 0; i < kIds; ++i) logits[i] = std::sin(static_cast<float>(i));
  const SeenIds seen(kIds);
  Random random(0);
  for (std::size_t id = 0; id < kIds; ++id) {
    const float before = std::exchange(logits[id], 2.0F), last = std::exchange(logits.back(), 2.0F);
    EXPECT_EQ(sample(logits, seen, {}, random), static_cast<std::int64_t>(id));
    logits.back() = last;
    logits[id] = before;
  }
}

// Most ids are too improbable to be kept, and the first are kept.
TEST(Sampler, TopPOfManyIdsKeepsTheSmallestSet) {
  std::vector<float> logits(2000);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[(i * 7) % logits.size()] = -0.05F * static_cast<float>(i);
  const SamplingOptions options{.temperature = 1.0, .top_p = 0.9};
  const auto expected = probabilities(logits, {}, options);
  const auto counts = counts_of(logits, {}, options, 20000);
  double chi_square = 0.0, kept = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (expected[i] == 0.0) {
      EXPECT_EQ(counts[i], 0) << i;
      continue;
    }
    const double mean = 20000 * expected[i], difference = static_cast<double>(counts[i]) - mean;
    chi_square += difference * difference / mean;
    kept += 1.0;
  }
  EXPECT_EQ(kept, 47);  // the least n with 1 − e^{−n/20} ≥ 0.9
  EXPECT_LE(chi_square, chi_square_limit(kept - 1.0));
}

TEST(Sampler, PenaltyActsOnGreedyAndOnBothSigns) {
  const auto greedy = [](const std::vector<float>& logits, double penalty) {
    Random random(0);
    return sample(logits, seen_of(2, {0}), {.repetition_penalty = penalty}, random);
  };
  EXPECT_EQ(greedy({3.0F, 2.0F}, 1.4), 0);    // 2.14
  EXPECT_EQ(greedy({3.0F, 2.0F}, 1.6), 1);    // 1.88
  EXPECT_EQ(greedy({-1.0F, -1.5F}, 1.4), 0);  // −1.4
  EXPECT_EQ(greedy({-1.0F, -1.5F}, 1.6), 1);  // −1.6
}

TEST(Sampler, ATinyTemperatureIsGreedyAndMaskedIdsNeverCome) {
  const std::vector<float> logits{1.0F, 1.0001F, -INFINITY, 0.5F};
  EXPECT_EQ(counts_of(logits, {}, {.temperature = 1e-300}, 100)[1], 100);
  EXPECT_EQ(counts_of(logits, {}, {.temperature = 1e6}, 3000)[2], 0);
}

// Ids of 24 draws with seed 7: softmax of ln(1 … 8), so that id i has the probability (i + 1) / 36. The expected ones
// come from a Philox 4x32-10 written in Python on the algorithm's paper.
TEST(Sampler, TheSameIdsOnEveryMachine) {
  std::vector<float> logits;
  for (int i = 1; i <= 8; ++i) logits.push_back(std::log(static_cast<float>(i)));
  std::vector<std::int64_t> ids;
  for (int draw = 0; draw < 24; ++draw) {
    Random random(7, draw);
    ids.push_back(sample(logits, SeenIds(8), {.temperature = 1.0}, random));
  }
  const std::vector<std::int64_t> expected{7, 5, 7, 6, 6, 3, 6, 5, 6, 5, 7, 6, 6, 5, 5, 6, 7, 4, 3, 5, 4, 7, 6, 3};
  EXPECT_EQ(ids, expected);
}

TEST(Sampler, Mistakes) {
  const auto refused = [](const SamplingOptions& options, const std::string& option) {
    expect_error([&] { validate(options); }, option, "");
  };
  refused({.temperature = -0.1}, "temperature");
  refused({.temperature = NAN}, "temperature");
  refused({.temperature = INFINITY}, "temperature");
  refused({.top_k = -1}, "top_k");
  refused({.top_p = -0.1}, "top_p");
  refused({.top_p = 1.01}, "top_p");
  refused({.repetition_penalty = 0.0}, "repetition_penalty");
  EXPECT_NO_THROW(validate(SamplingOptions{}));
  const auto draw = [](const std::vector<float>& logits) {
    Random random(1);
    return sample(logits, SeenIds(8), {.temperature = 1.0}, random);
  };
  EXPECT_THROW(draw({0.0F, NAN}), std::runtime_error);
  try {
    draw({0.0F, INFINITY});
    ADD_FAILURE() << "an infinite logit was drawn from";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "generate: the logit of token 1 is not finite");
  }
  EXPECT_THROW(draw({-INFINITY, -INFINITY}), std::runtime_error);
}

}  // namespace
}  // namespace efla::engine
