// The report on synthetic tasks without a browser: what it says.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/experiments/invented_tasks.h"
#include "tests/support/expect_text.h"

namespace efla::experiments {
namespace {

using test::invented_task_report;
using Row = std::vector<std::string>;

TEST(SyntheticReport, ShowsAccuracyByLengthBesideThePapers) {
  const auto report = invented_task_report();
  EXPECT_EQ(report.title, "Length extrapolation of the exponential integrator");
  EXPECT_EQ(report.summary, "1 of 8 runs diverged.");
  EXPECT_CONTAINS(report.caveat, "This is a small run");
  ASSERT_EQ(report.sections.size(), 3U);  // scores, curves, how to repeat it
  const auto& scores = report.sections[0];
  ASSERT_EQ(scores.tables.size(), 2U);
  EXPECT_EQ(scores.tables[0].columns[3].name, "Length 256");
  const auto& rows = scores.tables[0].rows;
  ASSERT_EQ(rows.size(), 4U);  // each mixer, and the paper's figures of each
  EXPECT_EQ(rows[0], (Row{"kda", "86.6\u00a0±\u00a01.4", "80.2\u00a0±\u00a01.4", "67.4\u00a0±\u00a01.4", "0.003", "2",
                          "0 of 2"}));
  EXPECT_CONTAINS(scores.lead, "that are best at the training length. A row of its own has the paper’s figures");
  EXPECT_EQ(rows[1][0], "kda, paper");
  EXPECT_EQ(rows[1][1], "99.9\u00a0±\u00a00.1");
  EXPECT_EQ(scores.tables[1].rows[2].back(), "1 of 2");
  ASSERT_EQ(scores.figures.size(), 2U);
  EXPECT_EQ(scores.figures[0].series[1].label, "kda-exact");
  EXPECT_EQ(scores.figures[0].series[0].line.size(), 3U);
  EXPECT_EQ(report.sections[1].figures[1].series[0].line.size(), 2U);
  EXPECT_EQ(report.results.at("scores").size(), 4U);
}

TEST(SyntheticReport, ShowsTasksOfOneLengthInOneTable) {
  const auto report = invented_task_report(/*by_length=*/false);
  EXPECT_EQ(report.title, "MAD: six synthetic tasks");
  ASSERT_EQ(report.sections[0].tables.size(), 1U);
  const auto& table = report.sections[0].tables[0];
  EXPECT_EQ(table.columns[1].name, "mqar");
  EXPECT_EQ(table.columns[3].name, "Average");
  EXPECT_EQ(table.rows[0], (Row{"kda", "86.6\u00a0±\u00a01.4", "88.6\u00a0±\u00a01.4", "87.6"}));
  EXPECT_TRUE(report.sections[0].figures.empty());
}

TEST(SyntheticReport, SaysWhichTestsDecidedAndNamesNoPaperWithoutFigures) {
  const Plan plan(mqar_plan(), "mqar", "tiny", {});
  const auto lead = synthetic_report(plan, test::invented_task_outcome()).sections[0].lead;
  EXPECT_CONTAINS(lead, "best on the tests that are not longer than the longest training examples.");
  EXPECT_LACKS(lead, "paper");
  EXPECT_CONTAINS(lead, "Bands in the charts reach one standard deviation");
}

TEST(SyntheticReport, KeepsBandsWithinWhatAnAccuracyCanBe) {
  auto outcome = test::invented_task_outcome();
  bool learned = false;
  for (auto& run : outcome.runs) {
    if (run.at("task") != "mqar" || run.at("mixer") != "kda") continue;
    learned = !learned;
    for (auto& measured : run["tests"]) measured["accuracy"] = learned ? 1.0 : 0.0;
  }
  const auto report = synthetic_report(Plan(extrapolation_plan(), "extrapolation", "tiny", {}), outcome);
  const auto& band = report.sections[0].figures[0].series[0].line.front().y;
  EXPECT_EQ(band.mean, 0.5);
  EXPECT_EQ(band.low, 0.0);
  EXPECT_EQ(band.high, 1.0);
}

void let_diverge(nlohmann::ordered_json& run) {
  run["diverged"] = true;
  run["tests"] = nlohmann::ordered_json::array();
  run["curve"][1]["accuracy"] = nullptr;
}

TEST(SyntheticReport, HasARowForAMixerThatAlwaysDiverged) {
  auto outcome = test::invented_task_outcome();
  for (auto& run : outcome.runs) {
    if (run.at("task") == "mqar" && run.at("mixer") == "kda") let_diverge(run);
  }
  const auto report = synthetic_report(Plan(extrapolation_plan(), "extrapolation", "tiny", {}), outcome);
  const auto& rows = report.sections[0].tables[0].rows;
  ASSERT_EQ(rows.size(), 4U);
  EXPECT_EQ(rows[0], (Row{"kda", "–", "–", "–", "0.003", "0", "2 of 2"}));
  EXPECT_EQ(rows[1][0], "kda, paper");
  EXPECT_EQ(rows[2][0], "kda-exact");
}

TEST(SyntheticReport, GoesWithoutTheFiguresOfATaskThatAlwaysDiverged) {
  auto outcome = test::invented_task_outcome();
  for (auto& run : outcome.runs) {
    if (run.at("task") == "stack") let_diverge(run);
  }
  const auto report = synthetic_report(Plan(extrapolation_plan(), "extrapolation", "tiny", {}), outcome);
  EXPECT_CONTAINS(report.caveat, "This is a tiny run");
  EXPECT_TRUE(report.sections[0].figures[1].series.empty());
  EXPECT_EQ(report.sections[0].tables[1].rows[0], (Row{"kda", "0.003", "0", "2 of 2"}));
  EXPECT_EQ(report.sections[1].figures[1].series[0].line.size(), 1U);
}

}  // namespace
}  // namespace efla::experiments
