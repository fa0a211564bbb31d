// The study of digits: its runs, curves, comparisons and report.
#include <gtest/gtest.h>

#include <string>

#include "experiments/plans.h"
#include "experiments/smnist/comparison.h"
#include "tests/experiments/invented_digits.h"
#include "tests/support/expect_error.h"
#include "tests/support/expect_text.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using test::expect_error;
using test::invented_digit_outcome;
using test::invented_digit_report;
using test::invented_digit_settings;

Plan plan(const std::string& scale, const json& given) { return {smnist_plan(), "smnist", scale, given}; }

std::vector<std::string> names(const json& settings) {
  std::vector<std::string> names;
  for (const auto& run : plan_digit_runs(settings)) names.push_back(run.name);
  return names;
}

TEST(DigitPlan, HasTheHeadlineOverSeedsAndTheRestOnce) {
  const json given{{"seeds", {4, 5}}, {"lr", {1e-3, 3e-3}}};
  const std::vector<std::string> expected{"efla-layers1-lr0.003-seed4", "deltanet-layers1-lr0.003-seed4",
                                          "efla-layers1-lr0.003-seed5", "deltanet-layers1-lr0.003-seed5",
                                          "efla-layers1-lr0.001-seed4", "deltanet-layers1-lr0.001-seed4",
                                          "efla-layers2-lr0.003-seed4", "deltanet-layers2-lr0.003-seed4"};
  EXPECT_EQ(names(plan("full", given).settings()), expected);
  EXPECT_EQ(names(plan("quick", {}).settings()).size(), 5U);
  expect_error([] { plan("full", {{"seeds", {4, 4}}}); }, "seeds", "4 twice");
  expect_error([] { plan("full", {{"seeds", json::array()}}); }, "seeds", "an empty list");
  expect_error([] { plan("huge", {}); }, "scale", "one of full, quick");
}

TEST(DigitCurve, AveragesOverStretchesOfAnEpoch) {
  std::vector<json> metrics;
  for (int step = 1; step <= 14; ++step) {
    metrics.push_back(
        {{"event", "step"}, {"step", step}, {"epoch", (step - 1) / 7 + 1}, {"loss", step}, {"accuracy", 0.5}});
    if (step % 7 == 0)
      metrics.push_back({{"event", "evaluation"}, {"step", step}, {"epoch", step / 7}, {"accuracy", 0.9}});
  }
  const auto curve = training_curve(metrics, 7, 4);
  ASSERT_EQ(curve.size(), 4U);
  EXPECT_EQ(curve[0]["step"], 4);
  EXPECT_EQ(curve[0]["train_loss"], 2.5);
  EXPECT_EQ(curve[0]["train_accuracy"], 0.5);
  EXPECT_FALSE(curve[0].contains("test_accuracy"));
  EXPECT_EQ(curve[1]["step"], 7);
  EXPECT_EQ(curve[1]["epoch"], 1.0);
  EXPECT_EQ(curve[1]["train_loss"], 6.0);
  EXPECT_EQ(curve[1]["test_accuracy"], 0.9);
  EXPECT_EQ(curve[3]["epoch"], 2.0);
  EXPECT_EQ(training_curve(metrics, 7, 100).size(), 14U);
}

// Runs of efla and deltanet at one layer with these accuracies, one per seed, at every level but the clean one.
std::vector<ordered_json> two_mixers(const std::vector<double>& efla, const std::vector<double>& deltanet) {
  std::vector<ordered_json> runs;
  const auto add = [&](const char* mixer, const std::vector<double>& accuracies) {
    for (std::size_t seed = 0; seed < accuracies.size(); ++seed) {
      const DigitRun run{mixer + std::to_string(seed), mixer, 1, 0.003, seed};
      runs.push_back(test::invented_digit_run(
          run, [&](std::size_t, std::size_t level) { return level == 0 ? 0.9 : accuracies[seed]; }));
    }
  };
  add("efla", efla);
  add("deltanet", deltanet);
  return runs;
}

std::string summary_of(const std::vector<ordered_json>& runs) {
  auto settings = invented_digit_settings();
  settings["lr"] = {0.003};
  settings["layers"] = {1};
  return digit_report("", settings, {runs, "", {}}).summary;
}

TEST(DigitComparison, GroupsRunsByConfiguration) {
  const auto groups = groups_of(invented_digit_outcome(invented_digit_settings()).runs);
  ASSERT_EQ(groups.size(), 5U);  // efla: one layer at two rates, two layers; deltanet: one and two layers
  EXPECT_EQ(groups[0].runs.size(), 3U);
  EXPECT_EQ(groups[0].curve("epoch", "test_accuracy").size(), 5U);
  const auto scale = groups[1].line(1);
  ASSERT_EQ(scale.size(), 5U);
  EXPECT_EQ(scale.front().x, 1.0);
  EXPECT_EQ(scale.front().y.mean, groups[1].of("clean_accuracy").mean);
}

TEST(DigitComparison, TakesTheDeviationOfTheMeanOverLevelsFromTheRuns) {
  // Seed 0 keeps at strong levels what it loses at weak ones, and seed 1 the other way round.
  std::vector<ordered_json> runs;
  for (const std::size_t seed : {0U, 1U}) {
    runs.push_back(test::invented_digit_run(
        {"", "efla", 1, 0.003, seed}, [&](std::size_t, std::size_t level) { return level % 2 == seed ? 0.7 : 0.5; }));
  }
  const auto mean = groups_of(runs)[0].mean_accuracy(1);  // four levels besides the clean one
  EXPECT_NEAR(mean.mean, 0.6, 1e-15);
  EXPECT_NEAR(mean.deviation, 0.0, 1e-15);
  EXPECT_NEAR(groups_of(runs)[0].accuracy(1, 4).deviation, std::sqrt(0.02), 1e-15);
}

TEST(DigitSummary, SaysHowTheClaimHolds) {
  EXPECT_CONTAINS(summary_of(two_mixers({0.80, 0.82}, {0.50, 0.52})),
                  "at the strongest level, ahead for dropout, scale, noise; in the mean");
  EXPECT_CONTAINS(summary_of(two_mixers({0.50, 0.52}, {0.80, 0.82})), "behind for dropout, scale, noise");
  EXPECT_CONTAINS(summary_of(two_mixers({0.60, 0.70}, {0.58, 0.68})), "within the spread for dropout, scale, noise");
  EXPECT_CONTAINS(summary_of(two_mixers({0.14, 0.14}, {0.10, 0.10})), "guessing, as deltanet is, for dropout");
  const auto one_seed = summary_of(two_mixers({0.8}, {0.5}));
  EXPECT_CONTAINS(one_seed, "With one seed there is no spread");
  EXPECT_LACKS(one_seed, "±");
}

TEST(DigitSummary, SetsTestsAndReadingsApart) {
  auto runs = two_mixers({0.80, 0.82}, {0.50, 0.52});
  for (int i : {0, 1}) {
    runs[i]["dropout"].back()["accuracy"] = 0.3;  // the strongest level
    for (auto& point : runs[i]["noise"]) point["accuracy"] = 0.51;
  }
  EXPECT_CONTAINS(summary_of(runs),
                  "at the strongest level, ahead for scale; behind for dropout; within the spread for "
                  "noise; in the mean over the levels, ahead for dropout, scale; within the spread "
                  "for noise.");
}

// What a run leaves whose training ended with a loss that is not finite.
ordered_json diverged(const ordered_json& run) {
  ordered_json entry{{"diverged", true}, {"curve", ordered_json::array()}};
  for (const char* key : {"name", "mixer", "layers", "lr", "seed", "epochs", "command"}) entry[key] = run.at(key);
  return entry;
}

TEST(DigitSummary, LeavesRunsThatDivergedOutOfTheFigures) {
  auto runs = two_mixers({0.80, 0.82, 0.10}, {0.50, 0.52, 0.54});
  runs[2] = diverged(runs[2]);
  const auto summary = summary_of(runs);
  EXPECT_CONTAINS(summary, "ahead for dropout, scale, noise");
  EXPECT_CONTAINS(summary, "1 of 6 runs diverged; all figures are of the other runs. On clean test images");
  EXPECT_CONTAINS(summary, "2 of 3 seeds");
  for (std::size_t i : {3U, 4U, 5U}) runs[i] = diverged(runs[i]);
  const auto one_mixer = summary_of(runs);
  EXPECT_LACKS(one_mixer, "Figure 1");
  EXPECT_CONTAINS(one_mixer, "4 of 6 runs diverged");
  EXPECT_LACKS(one_mixer, "deltanet");
}

TEST(DigitReport, CountsTheRunsThatDiverged) {
  const auto settings = invented_digit_settings();
  auto outcome = invented_digit_outcome(settings);
  for (auto& run : outcome.runs) {
    if (run.at("mixer") == "deltanet" && run.at("layers") == 1) run = diverged(run);  // all three seeds
  }
  const auto report = digit_report("", settings, outcome);
  EXPECT_EQ(report.sections[0].tables[0].rows.size(), 6U);  // two layers are still compared
  EXPECT_EQ(report.sections[1].figures[0].series.size(), 1U);
  const auto& row = report.sections[2].tables[0].rows[3];
  EXPECT_EQ(row[0], "deltanet");
  EXPECT_EQ(row[3], "0 of 3");
  EXPECT_EQ(row[4], "–");
  EXPECT_EQ(report.sections[5].figures[0].series.size(), 1U);
  EXPECT_EQ(report.sections[6].tables[1].rows[1].back(), "diverged");
  const auto& score = report.results.at("scores").at(3);
  EXPECT_EQ(score.at("mixer"), "deltanet");
  EXPECT_EQ(score.at("diverged"), 3);
  EXPECT_TRUE(score.at("accuracy")[0].at("mean").is_null());
  EXPECT_FALSE(report::render(report).empty());
}

TEST(DigitReport, HasEverySectionAndScore) {
  const auto report = invented_digit_report();
  EXPECT_EQ(report.title, "Robustness on built-in digit sequences");
  EXPECT_CONTAINS(report.caveat, "not MNIST");
  ASSERT_EQ(report.sections.size(), 7U);
  EXPECT_EQ(report.sections[0].tables[0].rows.size(), 12U);  // three panels, two levels, one and two layers
  EXPECT_EQ(report.sections[1].figures.size(), 3U);
  EXPECT_EQ(report.sections[3].figures[0].series.size(), 4U);
  EXPECT_EQ(report.sections[4].figures[0].series.size(), 2U);
  const auto& scores = report.results.at("scores");
  ASSERT_EQ(scores.size(), 15U);  // three panels of five configurations
  EXPECT_EQ(scores[0].at("task"), "dropout");
  EXPECT_EQ(scores[0].at("accuracy").size(), 8U);
  EXPECT_EQ(scores[0].at("accuracy")[7].at("p"), 0.8);
  EXPECT_EQ(report.results.at("runs").size(), 9U);
}

TEST(DigitReport, LeavesOutWhatWasNotCompared) {
  auto settings = invented_digit_settings();
  settings["mixers"] = {"longhorn", "rk4"};
  settings["layers"] = {1};
  settings["lr"] = {0.003};
  settings["data"] = "../mnist";
  settings["caveat"] = "This is a quick run.";
  const auto report = invented_digit_report(settings);
  EXPECT_TRUE(report.sections[0].tables[0].rows.empty());
  EXPECT_TRUE(report.sections[3].figures.empty());
  EXPECT_TRUE(report.sections[4].figures.empty());
  EXPECT_LACKS(report.summary, "Figure 1");
  EXPECT_EQ(report.caveat, "This is a quick run.");
  EXPECT_EQ(report.title, "A title");
}

}  // namespace
}  // namespace efla::experiments
