// The report on synthetic tasks without a browser: what it says, and results with parts missing.
#include "efla/report/synthetic_report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "efla/base/error.h"
#include "tests/report/expect_text.h"
#include "tests/report/synthetic_study_results.h"

namespace efla::report {
namespace {

using nlohmann::json;
using test::synthetic_study_results;

json charts_of(const std::string& page) {
  const std::string start = "id=\"charts\">";
  const auto begin = page.find(start) + start.size();
  return json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST(SyntheticReport, ShowsAccuracyByLengthBesideThePapers) {
  const auto page = render_synthetic_report(synthetic_study_results());
  EXPECT_CONTAINS(page, "Length extrapolation of the exponential integrator");
  EXPECT_CONTAINS(page, "1 of 8 runs diverged.");
  EXPECT_CONTAINS(page, "This is a small run");
  EXPECT_CONTAINS(page, ">Length 256</th>");
  EXPECT_CONTAINS(page, "<th scope=\"row\">kda</th><td class=\"n\">83.6 ± 2.0</td><td class=\"n\">77.2 ± 2.0</td>");
  EXPECT_CONTAINS(page, "<th scope=\"row\">kda, paper</th><td class=\"n\">98.7</td>");
  EXPECT_LACKS(page, "kda-exact, paper");
  EXPECT_CONTAINS(page, "1 of 2</td>");
  EXPECT_CONTAINS(page, "efla reproduce extrapolation");
  const auto charts = charts_of(page);
  ASSERT_EQ(charts.size(), 5U);  // two tasks by length, eigenvalues, two tasks by step
  EXPECT_EQ(charts[0].at("series")[1].at("label"), "kda-exact");
  EXPECT_EQ(charts[0].at("series")[0].at("points").size(), 3U);
  EXPECT_EQ(charts[2].at("id"), "eigenvalues-by-x");
  EXPECT_EQ(charts[4].at("series")[0].at("points").size(), 2U);
}

TEST(SyntheticReport, ShowsTasksOfOneLengthInOneTable) {
  const auto page = render_synthetic_report(synthetic_study_results(/*by_length=*/false));
  EXPECT_CONTAINS(page, "MAD: six synthetic tasks");
  EXPECT_CONTAINS(page, ">mqar</th>");
  EXPECT_CONTAINS(page, ">Average</th>");
  // 83.6 and 85.6
  EXPECT_CONTAINS(page, "<td class=\"n\">83.6 ± 2.0</td><td class=\"n\">85.6 ± 2.0</td><td class=\"n\">84.6</td>");
  EXPECT_LACKS(page, "Length 64");
}

TEST(SyntheticReport, LeavesOutWhatIsMissing) {
  const auto page = render_synthetic_report({{"schema", 1}, {"study", "state-tracking"}, {"scale", "tiny"}});
  EXPECT_CONTAINS(page, "This is a tiny run");
  EXPECT_LACKS(page, "runs diverged");
  EXPECT_TRUE(charts_of(page).empty());
  auto results = synthetic_study_results();
  results["scores"][0]["mixer"] = "<b>";
  results["scores"][0]["accuracy"] = 3;
  results["eigenvalues"]["kda"] = "none";
  const auto odd = render_synthetic_report(results);
  EXPECT_LACKS(odd, "<b>");
  EXPECT_EQ(charts_of(odd).size(), 4U);
  EXPECT_THROW(render_synthetic_report(json::array()), Error);
  EXPECT_THROW(render_synthetic_report({{"schema", 2}}), Error);
}

}  // namespace
}  // namespace efla::report
