// The report on training runs without a browser: what it says, and runs with parts missing.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "experiments/common/lm_runs.h"
#include "tests/experiments/invented_lm_runs.h"
#include "tests/support/expect_text.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using test::invented_lm_run;

std::string page_of(const std::vector<LmRunRecord>& runs) { return report::render(compare_lm_runs(runs)); }

// The part of a page from one text to the next.
std::string between(const std::string& page, const std::string& from, const std::string& to) {
  const auto begin = page.find(from), end = page.find(to, begin);
  return begin == std::string::npos || end == std::string::npos ? "" : page.substr(begin, end - begin);
}

TEST(LmRuns, ComparesRuns) {
  const auto page = page_of({invented_lm_run("a", "efla", 1e-3, 1.5), invented_lm_run("b", "deltanet", 3e-3, 1.4)});
  EXPECT_CONTAINS(page, "Training runs compared");
  EXPECT_CONTAINS(page, "b has the lowest validation perplexity: 4.");
  EXPECT_CONTAINS(page, "after 4,096,000 tokens");
  const auto results = between(page, "id=\"results\"", "</section>");
  EXPECT_CONTAINS(results, ">1,032,448<");
  EXPECT_CONTAINS(results, ">5,003<");  // the median of the steps
  EXPECT_CONTAINS(results, ">800<");
  const auto settings = between(page, "id=\"settings\"", "</section>");
  const auto differing = between(settings, "<thead>", "<details>");
  EXPECT_CONTAINS(differing, "<th scope=\"col\">model.mixer</th><th scope=\"col\">training.lr</th></tr>");
  EXPECT_CONTAINS(differing, "<td>deltanet</td><td>0.003</td>");
  EXPECT_LACKS(differing, "seed");
  EXPECT_CONTAINS(settings, "<th scope=\"row\">training.betas</th><td>[0.9,0.95]</td>");
  EXPECT_CONTAINS(between(page, "id=\"samples\"", "</section>"), "of b");
  const auto charts = json::parse(between(page, "id=\"charts\">", "</script>").substr(12));
  ASSERT_EQ(charts.size(), 3U);
  for (const auto& chart : charts) EXPECT_EQ(chart.at("series").size(), 2U);
  const auto& loss = charts[0].at("series")[0].at("points");
  EXPECT_EQ(loss.size(), 120U);
  EXPECT_EQ(loss.back()[0], 4096000.0);
  EXPECT_EQ(charts[1].at("series")[0].at("points").size(), 4U);
}

TEST(LmRuns, LeavesOutWhatIsMissing) {
  auto run = invented_lm_run("a<b>", "efla", 1e-3, 1.5);
  run.metrics = {{{"event", "step"}, {"step", 1}, {"tokens", 8}, {"loss", nullptr}},
                 {{"event", "step"}, {"step", 2}, {"tokens", 16}, {"loss", 2.5}},
                 {{"event", "evaluation"}, {"tokens", 16}, {"perplexity", "high"}},
                 17};
  run.run = 3;
  const auto page = page_of({run});
  EXPECT_CONTAINS(page, "Training of a&lt;b&gt;");
  EXPECT_LACKS(page, "a<b>");
  EXPECT_CONTAINS(page, "Training loss");
  EXPECT_LACKS(page, "lowest validation");
  EXPECT_LACKS(page, "id=\"settings\"");
  EXPECT_LACKS(page, "id=\"samples\"");
  EXPECT_CONTAINS(page_of({{"\xff", {}, {}}}), "\xef\xbf\xbd");
}

}  // namespace
}  // namespace efla::experiments
