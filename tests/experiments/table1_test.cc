// Table 1: which runs follow the learning rates of the first seed, what a folder must agree on, and the tables.
#include <gtest/gtest.h>

#include <cmath>

#include "experiments/plans.h"
#include "experiments/table1/study.h"
#include "tests/support/expect_text.h"

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
          {"hardware", "a GPU"},
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

Study tiny_table1(const json& given, const LmTokens& tokens = {"tokens", {{"train", "a"}}}) {
  const auto never = [](const json&, const std::filesystem::path&, const RunContext&) {
    return LmOutcome{LmEnd::finished};
  };
  return table1_study(Plan(table1_plan(), "table1", "tiny", given), tokens, never);
}

TEST(Table1, TrainsTheOtherSeedsAtTheBestRate) {
  const auto study = tiny_table1(kGiven);
  ASSERT_EQ(study.runs.size(), 6U);
  EXPECT_EQ(study.runs[3].name, "efla-lr0.01-seed1");
  std::vector<std::string> names;
  for (const auto& run : study.more(kSweep)) names.push_back(run.name);
  EXPECT_EQ(names, (std::vector<std::string>{"efla-lr0.01-seed2", "deltanet-lr0.001-seed2", "gdn-lr0.001-seed2"}));
}

TEST(Table1, TrainsASeedOfEveryMixerBeforeTheNextSeed) {
  auto given = kGiven;
  given["seeds"] = {1, 2, 3};
  std::vector<std::string> names;
  for (const auto& run : tiny_table1(given).more(kSweep)) names.push_back(run.name);
  ASSERT_EQ(names.size(), 6U);
  EXPECT_EQ(names[2], "gdn-lr0.001-seed2");
  EXPECT_EQ(names[3], "efla-lr0.01-seed3");
}

TEST(Table1, ContinuesAFolderWithOtherMixersRatesAndSeeds) {
  const auto agreed = description(tiny_table1(kGiven));
  const json part{{"mixers", {"gdn"}}, {"lr", {0.1}}, {"seeds", {5}}};
  EXPECT_EQ(description(tiny_table1(part)), agreed);
  EXPECT_EQ(description(tiny_table1(kGiven, {"elsewhere", {{"train", "a"}}})), agreed);
  EXPECT_NE(description(tiny_table1(kGiven, {"tokens", {{"train", "b"}}})), agreed);
  auto longer = kGiven;
  longer["config"]["training"]["steps"] = 7;
  EXPECT_NE(description(tiny_table1(longer)), agreed);
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

  const auto report = tiny_table1(kGiven).report({runs, "", {}});
  EXPECT_TRUE(report.sections[0].tables[0].rows.empty()) << "no task was scored";
  const auto& tables = report.sections[1].tables;
  EXPECT_EQ(tables[0].rows[0], (std::vector<std::string>{"efla", "0.01", "4.100", "0.100", "4.000, 4.200"}));
  EXPECT_EQ(tables[1].rows[1], (std::vector<std::string>{"deltanet", "6.000", "diverged"}));
}

TEST(Table1, HasRunsThatCanBeTrainedAtEveryScale) {
  for (const char* scale : {"tiny", "quick", "small", "medium", "large"}) {
    const Plan plan(table1_plan(), "table1", scale, {});
    const auto& settings = plan.settings();
    EXPECT_EQ(table1_study(plan, {"tokens", {}}, {}).runs.size(),
              settings.at("mixers").size() * settings.at("lr").size())
        << scale;
  }
}

TEST(Table1, SaysFirstWhetherEflaAndDeltanetDifferBeyondTheSpread) {
  const json given{{"mixers", {"efla", "deltanet"}}, {"lr", {0.01}}, {"seeds", {1, 2}}};
  const auto summary = [&](const std::vector<double>& efla, const std::vector<double>& deltanet) {
    std::vector<ordered_json> runs;
    for (std::size_t i = 0; i < efla.size(); ++i) {
      runs.push_back(table1_entry("efla", 0.01, static_cast<int>(i) + 1, efla[i]));
      runs.push_back(table1_entry("deltanet", 0.01, static_cast<int>(i) + 1, deltanet[i]));
    }
    return tiny_table1(given).report({runs, "", {}}).summary;
  };
  EXPECT_CONTAINS(summary({4.0, 4.2}, {5.0, 5.2}),
                  "19.6\u00a0% below that of deltanet, beyond the spread of the seeds: 4.100");
  EXPECT_CONTAINS(summary({4.0, 5.0}, {4.5, 5.7}),
                  "11.8\u00a0% below that of deltanet, within the spread of the seeds: 4.500");
  EXPECT_CONTAINS(summary({6.0, 6.2}, {5.0, 5.2}), "19.6\u00a0% above that of deltanet, beyond the spread");
  EXPECT_CONTAINS(summary({4.0}, {5.0}), "With one seed there is no spread");
  const json alone{{"mixers", {"efla"}}, {"lr", {0.01}}, {"seeds", {1}}};
  EXPECT_EQ(tiny_table1(alone).report({{table1_entry("efla", 0.01, 1, 4.0)}, "", {}}).summary, "");
}

TEST(Table1, ShowsTheTasksBesideThePaper) {
  const json given{{"mixers", {"efla"}}, {"lr", {0.01}}, {"seeds", {1, 2}}};
  std::vector<ordered_json> runs{table1_entry("efla", 0.01, 1, 4.0), table1_entry("efla", 0.01, 2, 4.2)};
  runs[0]["table_1"] = {{"wikitext word_perplexity", 100.0}, {"piqa acc", 0.5}};
  runs[1]["table_1"] = {{"wikitext word_perplexity", 102.0}, {"piqa acc", 0.6}};
  const auto study = tiny_table1(given);
  const auto scores = score_models(Plan(table1_plan(), "table1", "tiny", given).settings(), runs);
  EXPECT_NEAR(scores[0].at("table_1").at("piqa acc").at("mean"), 0.55, 1e-12);
  EXPECT_NEAR(scores[0].at("table_1").at("piqa acc").at("standard_error"), 0.05, 1e-12);

  const auto report = study.report({runs, "", {}});
  const auto& table = report.sections[0].tables[0];
  ASSERT_EQ(table.columns.size(), 13U);
  ASSERT_EQ(table.rows.size(), 5U);  // and the paper's four
  EXPECT_EQ(table.rows[0][1], "101.00 ± 1.00");
  EXPECT_EQ(table.rows[0][2], "–");
  EXPECT_EQ(table.columns[4].name, "piqa acc");
  EXPECT_EQ(table.rows[0][4], "55.0 ± 5.0");
  EXPECT_EQ(table.rows[2][0], "efla, paper");
  EXPECT_EQ(table.rows[2][1], "37.01");
  EXPECT_EQ(table.rows[2][12], "43.6");
}

}  // namespace
}  // namespace efla::experiments
