// Table 1: which runs follow the learning rates of the first seed, and the table of perplexities.
#include <gtest/gtest.h>

#include <cmath>

#include "experiments/plans.h"
#include "experiments/table1/study.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

ordered_json table1_entry(const std::string& mixer, double lr, int seed, json perplexity) {
  return {{"name", mixer + std::to_string(seed)},
          {"mixer", mixer},
          {"lr", lr},
          {"seed", seed},
          {"parameters", 10},
          {"diverged", perplexity.is_null()},
          {"perplexity", perplexity},
          {"curve", ordered_json::array({{{"tokens", 8}, {"loss", 2.0}}})}};
}

// efla is best at 0.01, deltanet at 0.001; gdn diverges at every rate.
const std::vector<ordered_json> kSweep{
    table1_entry("efla", 0.001, 1, 5.0),        table1_entry("deltanet", 0.001, 1, 6.0),
    table1_entry("gdn", 0.001, 1, nullptr),     table1_entry("efla", 0.01, 1, 4.0),
    table1_entry("deltanet", 0.01, 1, nullptr), table1_entry("gdn", 0.01, 1, nullptr)};
const json kGiven{{"mixers", {"efla", "deltanet", "gdn"}}, {"lr", {0.001, 0.01}}, {"seeds", {1, 2}}};

TEST(Table1, TrainsTheOtherSeedsAtTheBestRate) {
  const auto never = [](const json&, const std::filesystem::path&, const RunContext&) { return LmEnd::finished; };
  const auto study = table1_study(Plan(table1_plan(), "table1", "tiny", kGiven), "tokens", never);
  ASSERT_EQ(study.runs.size(), 6U);
  EXPECT_EQ(study.runs[3].name, "efla-lr0.01-seed1");
  EXPECT_EQ(study.runs[3].description.at("training").at("min_lr"), 0.001);
  std::vector<std::string> names;
  for (const auto& run : study.more(kSweep)) names.push_back(run.name);
  EXPECT_EQ(names, (std::vector<std::string>{"efla-lr0.01-seed2", "deltanet-lr0.001-seed2", "gdn-lr0.001-seed2"}));
}

TEST(Table1, RanksMixersByTheMeanOverSeeds) {
  auto runs = kSweep;
  runs.push_back(table1_entry("efla", 0.01, 2, 4.2));
  runs.push_back(table1_entry("deltanet", 0.001, 2, nullptr));
  runs.push_back(table1_entry("gdn", 0.001, 2, nullptr));
  const Plan plan(table1_plan(), "table1", "tiny", kGiven);
  const auto scores = score_models(plan.settings(), runs);
  ASSERT_EQ(scores.size(), 3U);
  EXPECT_EQ(scores[0].at("mixer"), "efla");
  EXPECT_EQ(scores[0].at("lr"), 0.01);
  EXPECT_NEAR(scores[0].at("perplexity"), 4.1, 1e-12);
  EXPECT_NEAR(scores[0].at("standard_error"), 0.1, 1e-12);
  EXPECT_EQ(scores[1].at("perplexity"), 6.0);
  EXPECT_EQ(scores[1].at("diverged"), 1);
  EXPECT_TRUE(scores[1].at("standard_error").is_null());
  EXPECT_TRUE(scores[2].at("perplexity").is_null());

  const auto report = table1_study(plan, "tokens", {}).report({runs, "", {}});
  const auto& tables = report.sections[0].tables;
  EXPECT_EQ(tables[0].rows[0], (std::vector<std::string>{"efla", "0.01", "4.100", "0.100", "4.000, 4.200"}));
  EXPECT_EQ(tables[1].rows[1], (std::vector<std::string>{"deltanet", "6.000", "diverged"}));
}

}  // namespace
}  // namespace efla::experiments
