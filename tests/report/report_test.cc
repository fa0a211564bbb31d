// The report without a browser: numbers, words, escaping, and results with parts missing.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/base/error.h"
#include "efla/report/html.h"
#include "efla/report/smnist_report.h"
#include "efla/report/smnist_study.h"
#include "efla/report/smnist_summary.h"
#include "tests/report/expect_text.h"
#include "tests/report/synthetic_results.h"

namespace efla::report {
namespace {

using nlohmann::json;
using test::synthetic_results;
using test::SyntheticStudy;

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

// Two mixers at one layer with these accuracies, one a seed, at one level of each test.
json two_mixers(const std::vector<double>& efla, const std::vector<double>& deltanet) {
  json results{{"schema", 1}, {"runs", json::array()}};
  const auto add = [&](const char* mixer, const std::vector<double>& accuracies) {
    int seed = 0;
    for (const double a : accuracies) {
      json run{{"mixer", mixer}, {"layers", 1}, {"lr", 0.003}, {"seed", ++seed}, {"clean_accuracy", 0.9}};
      run["dropout"] = {{{"p", 0.6}, {"accuracy", a}}};
      run["scale"] = {{{"factor", 16}, {"accuracy", a}}};
      run["noise"] = {{{"sigma", 0.4}, {"accuracy", a}}};
      results["runs"].push_back(run);
    }
    results["mixers"][mixer] = {{"lr", 0.003}, {"layers", 1}};
  };
  add("efla", efla);
  add("deltanet", deltanet);
  return results;
}

// As two_mixers, but dropout at levels 0.2 and 0.6 with these accuracies, a pair a seed.
using Pairs = std::vector<std::pair<double, double>>;
json two_dropouts(const Pairs& efla, const Pairs& deltanet) {
  auto results = two_mixers(std::vector<double>(efla.size(), 0.5), std::vector<double>(deltanet.size(), 0.5));
  for (std::size_t i = 0; i < results["runs"].size(); ++i) {
    const auto [low, high] = i < efla.size() ? efla[i] : deltanet[i - efla.size()];
    results["runs"][i]["dropout"] = {{{"p", 0.2}, {"accuracy", low}}, {{"p", 0.6}, {"accuracy", high}}};
  }
  return results;
}

std::string words(const json& results) { return summary(read_study(results)); }

TEST(ReportText, EscapesWhatHtmlReads) {
  EXPECT_EQ(escape("a<b>&\"c'"), "a&lt;b&gt;&amp;&quot;c&#39;");
  EXPECT_EQ(script_json({"</script><!--"}), R"(["\u003c/script>\u003c!--"])");
  EXPECT_EQ(json::parse(script_json({"</script>"})), json({"</script>"}));
  EXPECT_EQ(script_json({"\xff"}), "[\"\xef\xbf\xbd\"]");
}

TEST(ReportText, FillsATemplateOnce) {
  EXPECT_EQ(fill("a {{x}} b {{y}}", {{"x", "{{y}}"}, {"y", "1"}}), "a {{y}} b 1");
  EXPECT_THROW(fill("{{z}}", {{"x", ""}}), std::logic_error);
}

TEST(ReportText, WritesNumbersForPeople) {
  EXPECT_EQ(fixed(-1.25, 1), "−1.2");
  EXPECT_EQ(fixed(-0.01, 1), "0.0");
  EXPECT_EQ(fixed(NAN, 1), "–");
  EXPECT_EQ(compact(0.003), "0.003");
  EXPECT_EQ(compact(16), "16");
  EXPECT_EQ(percent(0.9654), "96.5\u00a0%");
  EXPECT_EQ(thousands(1234567.4), "1,234,567");
  EXPECT_EQ(thousands(999), "999");
  EXPECT_EQ(thousands(-1000), "−1,000");
  EXPECT_EQ(points(0.082), "+8.2");
  EXPECT_EQ(points(-0.0001), "0.0");
}

TEST(ReportStudy, TakesMeanAndSampleDeviationOverSeeds) {
  const auto s = spread_of({0.5, 0.7, 0.9});
  EXPECT_DOUBLE_EQ(s.mean, 0.7);
  EXPECT_NEAR(s.std, 0.2, 1e-15);
  EXPECT_EQ(s.low, 0.5);
  EXPECT_EQ(s.high, 0.9);
  EXPECT_EQ(s.count, 3);
  EXPECT_TRUE(std::isnan(spread_of({0.5}).std));
  EXPECT_TRUE(std::isnan(spread_of({}).mean));
}

TEST(ReportStudy, GroupsRunsByConfiguration) {
  const auto study = read_study(synthetic_results());
  ASSERT_EQ(study.mixers, (std::vector<std::string>{"efla", "deltanet"}));
  ASSERT_EQ(study.groups.size(), 6U);  // efla: one layer at three rates, two layers; deltanet: one and two layers
  EXPECT_EQ(study.groups[0].lr, 0.001);
  EXPECT_EQ(study.groups[3].layers, 2);
  for (const auto& group : study.groups) EXPECT_EQ(group.clean.count, 3);
  ASSERT_EQ(study.headline.size(), 2U);
  EXPECT_EQ(study.headline[0].lr, 0.003);
  EXPECT_EQ(study.headline[0].accuracy_by_epoch.size(), 5U);
  const auto scale = with_clean(study.headline[1], 1);
  ASSERT_EQ(scale.size(), 5U);
  EXPECT_EQ(scale.front().x, 1);
  EXPECT_EQ(scale.front().y.mean, study.headline[1].clean.mean);
}

TEST(ReportStudy, AgreesWithTheHeadlineOfTheResults) {
  auto results = synthetic_results();
  const auto with_runs = read_study(results).headline;
  results.erase("runs");
  const auto without = read_study(results).headline;
  for (std::size_t m = 0; m < 2; ++m) {
    for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
      ASSERT_EQ(with_runs[m].perturbed[i].size(), without[m].perturbed[i].size());
      for (std::size_t j = 0; j < without[m].perturbed[i].size(); ++j) {
        EXPECT_NEAR(with_runs[m].perturbed[i][j].y.mean, without[m].perturbed[i][j].y.mean, 1e-12);
        EXPECT_NEAR(with_runs[m].perturbed[i][j].y.std, without[m].perturbed[i][j].y.std, 1e-12);
      }
    }
  }
}

TEST(ReportStudy, LeavesOutWhatIsNotANumber) {
  auto results = two_mixers({0.5, 0.6}, {0.5});
  results["runs"][0]["dropout"][0]["accuracy"] = nullptr;  // what NaN becomes in JSON
  results["runs"][1]["noise"] = "none";
  const auto efla = read_study(results).headline[0];
  EXPECT_EQ(efla.perturbed[0].front().y.count, 1);
  EXPECT_EQ(efla.perturbed[0].front().y.mean, 0.6);
  EXPECT_EQ(efla.perturbed[2].front().y.count, 1);
}

TEST(ReportSummary, SaysWhenTheClaimHolds) {
  const auto text = words(two_mixers({0.80, 0.82}, {0.50, 0.52}));
  EXPECT_CONTAINS(text, "these figures agree");
  EXPECT_CONTAINS(text, "ahead by 30.0 points under an intensity factor of\u00a016");
  EXPECT_CONTAINS(text, "(81.0\u00a0±\u00a01.4 against 51.0\u00a0±\u00a01.4\u00a0%)");
}

TEST(ReportSummary, SaysWhenTheClaimDoesNotHold) {
  const auto text = words(two_mixers({0.50, 0.52}, {0.80, 0.82}));
  EXPECT_CONTAINS(text, "do not bear that out in any");
  EXPECT_CONTAINS(text, "behind by 30.0 points under dropout of p");
  EXPECT_LACKS(text, "ahead by");
}

TEST(ReportSummary, SaysWhereTheClaimHoldsInPart) {
  auto results = two_mixers({0.80, 0.82}, {0.50, 0.52});
  for (int i : {0, 1}) results["runs"][i]["dropout"][0]["accuracy"] = 0.3;
  EXPECT_CONTAINS(words(results), "bear that out for scale and noise, and not for dropout");
}

TEST(ReportSummary, BearsTheClaimOutOnlyWhereTheMeanOverLevelsDoesToo) {
  const auto strongest = words(two_dropouts({{0.70, 0.60}, {0.71, 0.61}}, {{0.90, 0.50}, {0.91, 0.51}}));
  EXPECT_CONTAINS(strongest,
                  "these figures bear that out only at the strongest level for dropout, and not for scale and noise.");
  EXPECT_CONTAINS(strongest, "ahead by 10.0 points under dropout of p\u00a0=\u00a00.6");
  EXPECT_CONTAINS(strongest, "the difference in points is −5.0 for dropout, 0.0 for scale (within the spread)");
  EXPECT_CONTAINS(words(two_dropouts({{0.90, 0.50}, {0.91, 0.51}}, {{0.70, 0.51}, {0.71, 0.50}})),
                  "bear that out only in the mean over the levels for dropout, and not for scale and noise.");
  EXPECT_CONTAINS(words(two_dropouts({{0.90, 0.60}, {0.91, 0.61}}, {{0.70, 0.50}, {0.71, 0.51}})),
                  "bear that out for dropout, and not for scale and noise.");
}

TEST(ReportSummary, TakesTheDeviationOfTheMeanOverLevelsFromTheRuns) {
  auto results = two_dropouts({{0.50, 0.70}, {0.70, 0.50}}, {{0.40, 0.30}, {0.50, 0.40}});
  const auto study = read_study(results);
  const auto c = compare(study.headline[0], study.headline[1], 0);
  ASSERT_TRUE(c);
  EXPECT_EQ(c->levels, 2);
  EXPECT_NEAR(c->mean.a.mean, 0.6, 1e-15);
  EXPECT_NEAR(c->mean.a.std, 0.0, 1e-15);  // although every level has one of 0.14
  EXPECT_NEAR(c->mean.b.mean, 0.4, 1e-15);
  EXPECT_NEAR(c->mean.b.std, std::sqrt(0.005), 1e-15);
}

TEST(ReportSummary, BoundsTheDeviationOfTheMeanOverLevelsWithoutTheRuns) {
  auto results = synthetic_results();
  const auto with_runs = read_study(results).headline;
  results.erase("runs");
  const auto without = read_study(results).headline;
  for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
    const auto exact = compare(with_runs[0], with_runs[1], i), bound = compare(without[0], without[1], i);
    ASSERT_TRUE(exact && bound);
    EXPECT_NEAR(bound->mean.a.mean, exact->mean.a.mean, 1e-12);
    EXPECT_GE(bound->mean.a.std, exact->mean.a.std - 1e-12);
    EXPECT_GT(bound->mean.a.std, 0);
  }
}

TEST(ReportSummary, DoesNotCallADifferenceWithinTheSpreadALead) {
  const auto text = words(two_mixers({0.60, 0.70}, {0.58, 0.68}));
  EXPECT_CONTAINS(text, "not clearly apart");
  EXPECT_LACKS(text, "ahead by");
}

TEST(ReportSummary, DoesNotCallGuessingALead) {
  const auto text = words(two_mixers({0.14, 0.14}, {0.10, 0.10}));
  EXPECT_CONTAINS(text, "down to guessing");
  EXPECT_LACKS(text, "ahead by");
}

TEST(ReportSummary, SaysThatOneSeedHasNoSpread) {
  const auto text = words(two_mixers({0.8}, {0.5}));
  EXPECT_CONTAINS(text, "With one seed there is no spread");
  EXPECT_LACKS(text, "±");
}

TEST(ReportSummary, ComparesAtTheStrongestLevelThatBothHave) {
  auto results = two_mixers({0.8}, {0.5});
  results["runs"][0]["scale"].push_back({{"factor", 32}, {"accuracy", 0.1}});
  const auto study = read_study(results);
  const auto c = compare(study.headline[0], study.headline[1], 1);
  ASSERT_TRUE(c);
  EXPECT_EQ(c->strongest_level, 16);
  EXPECT_EQ(c->levels, 1);
  results["runs"][1].erase("scale");
  const auto without = read_study(results);
  EXPECT_FALSE(compare(without.headline[0], without.headline[1], 1));
}

TEST(ReportSummary, SpeaksOfTwoLayersToo) {
  EXPECT_CONTAINS(words(synthetic_results()), "With two layers, the figures ");
  SyntheticStudy shallow;
  shallow.layers = {1};
  EXPECT_LACKS(words(synthetic_results(shallow)), "With two layers");
}

TEST(ReportSummary, NamesTheLeaderOfOtherMixers) {
  SyntheticStudy study;
  study.mixers = {"longhorn", "rk4"};
  EXPECT_CONTAINS(words(synthetic_results(study)), "Highest of all two mixers: ");
}

TEST(Report, RendersWithoutAnyPart) {
  const auto whole = synthetic_results();
  for (const auto& [key, value] : whole.items()) {
    auto part = whole;
    part.erase(key);
    EXPECT_CONTAINS(render_smnist_report(part), "</html>");
    if (key == "schema") continue;
    for (const json& other : {json(), json("text"), json(1), json{1, "two", nullptr}, json::object()}) {
      part[key] = other;
      EXPECT_CONTAINS(render_smnist_report(part), "</html>");
    }
  }
  for (const auto& [key, value] : whole["runs"][0].items()) {
    auto part = whole;
    for (auto& run : part["runs"]) run.erase(key);
    EXPECT_CONTAINS(render_smnist_report(part), "</html>");
  }
  for (const auto& [key, value] : whole["mixers"]["efla"].items()) {
    auto part = whole;
    part["mixers"]["efla"].erase(key);
    EXPECT_CONTAINS(render_smnist_report(part), "</html>");
  }
}

TEST(Report, LeavesOutSectionsWithoutFigures) {
  const auto page = render_smnist_report({{"schema", 1}});
  EXPECT_EQ(count(page, "<section"), 0U);
  EXPECT_EQ(count(page, "<canvas"), 0U);
  auto results = synthetic_results();
  EXPECT_EQ(count(render_smnist_report(results), "<section"), 7U);
  results.erase("runs");
  const auto brief = render_smnist_report(results);
  EXPECT_EQ(count(brief, "<section"), 4U);  // the comparison, robustness, the table, how to repeat it
  EXPECT_EQ(count(brief, "<canvas"), 3U);
}

TEST(Report, RefusesOtherResults) {
  EXPECT_THROW(render_smnist_report(json::array()), Error);
  EXPECT_THROW(render_smnist_report({{"schema", 2}}), Error);
  EXPECT_THROW(render_smnist_report({{"schema", "one"}}), Error);
}

TEST(Report, KeepsHostileNamesAsText) {
  const std::string hostile = "</script><img src=x onerror=alert(1)>{{results}}";
  SyntheticStudy study;
  study.mixers = {hostile, "efla"};
  auto results = synthetic_results(study);
  results["command"] = "efla '" + hostile + "'";
  results["data"] = hostile;
  results["environment"]["cpu"] = hostile;
  results["environment"][hostile] = hostile;
  const auto page = render_smnist_report(results);
  EXPECT_EQ(count(page, "</script>"), count(render_smnist_report(synthetic_results()), "</script>"));
  EXPECT_EQ(count(page, "<img"), 0U);
  EXPECT_EQ(count(page, "onerror=alert(1)>"), 0U + count(page, "\\u003cimg src=x onerror=alert(1)>"));
}

TEST(Report, ShowsBytesThatAreNotText) {
  auto results = synthetic_results();
  results["runs"][0]["command"] = "efla \xff\xfe";
  results["mixers"]["\xc3"] = results["mixers"]["efla"];
  EXPECT_CONTAINS(render_smnist_report(results), "efla \xef\xbf\xbd");
}

TEST(Report, SaysWhatTheFiguresAreNot) {
  auto results = synthetic_results();
  results["quick"] = true;
  const auto quick = render_smnist_report(results);
  EXPECT_EQ(count(quick, "not MNIST"), 1U);
  EXPECT_EQ(count(quick, "This is a quick run"), 1U);
  results["quick"] = false;
  results["data"] = "../shared/data";
  const auto real = render_smnist_report(results);
  EXPECT_EQ(count(real, "class=\"caveat\""), 0U);
  EXPECT_EQ(count(real, "<code>../shared/data</code>"), 1U);
}

}  // namespace
}  // namespace efla::report
