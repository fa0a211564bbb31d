// The report without a browser: numbers, escaping, sections, tables on a terminal.
#include "efla/report/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <tuple>

#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/report/html.h"
#include "tests/support/expect_text.h"
#include "tests/support/temp_folder.h"

namespace efla::report {
namespace {

using nlohmann::json;

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

Spread spread(std::vector<double> values) { return spread_of(values); }

Report small_report() {
  Report report{"efla reproduce nothing", "A title", {"a fact"}, "a caveat", "a summary"};
  Figure figure{"figure", "A figure", "step"};
  figure.series = {{"first", category_style(0), {{1, spread({2, 3})}, {2, spread({4})}}},
                   {"second", category_style(7), {{1, spread({5})}}}};
  Table table{"A table", {{"Name", false}, {"Value"}}, {{"one", "1.0"}, {"twenty", "20.0"}}};
  report.sections = {{"id", "A heading", "an aside", "a lead", {figure}, {table}, {{"", "some text"}}},
                     {"empty", "Left out", "", "a lead", {{"none", "No lines", "step"}}, {{"No rows", {{"Name"}}}}},
                     how_to_repeat("efla reproduce nothing --out x", {{"cpu", "a processor"}, {"other", 3}}, table)};
  report.results = {{"b", 1}, {"a", 2}};
  return report;
}

TEST(Statistics, TakeMeanAndSampleDeviation) {
  const auto s = spread({0.5, 0.7, 0.9});
  EXPECT_DOUBLE_EQ(s.mean, 0.7);
  EXPECT_NEAR(s.deviation, 0.2, 1e-15);
  EXPECT_EQ(s.low, 0.5);
  EXPECT_EQ(s.high, 0.9);
  EXPECT_EQ(s.count, 3);
  EXPECT_NEAR(standard_error(s), 0.2 / std::sqrt(3.0), 1e-15);
  EXPECT_TRUE(std::isnan(spread({0.5}).deviation));
  EXPECT_TRUE(std::isnan(standard_error(spread({0.5}))));
  EXPECT_TRUE(std::isnan(spread({}).mean));
  EXPECT_TRUE(beyond_spread(spread({1, 3}), spread({4.9, 6.9})));
  EXPECT_FALSE(beyond_spread(spread({1, 3}), spread({3.8, 5.8}))) << "the deviations are √2 each";
  EXPECT_TRUE(beyond_spread(spread({1, 3}), spread({2.1}))) << "one value has no deviation";
  EXPECT_FALSE(beyond_spread(spread({1, 3}), spread({})));
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_TRUE(std::isnan(median({})));
}

TEST(ReportSections, NameTheDevicesOfTheEnvironment) {
  const auto rows_of = [](const json& environment) { return how_to_repeat("", environment, {}).tables[0].rows; };
  using Rows = std::vector<std::vector<std::string>>;
  EXPECT_EQ(rows_of({{"cuda", false}, {"gpus", json::array()}}), (Rows{{"CUDA", "no"}, {"GPUs", "none"}}));
  const json gpu{{"name", "NVIDIA H200"}, {"memory_bytes", 150754820096}};
  EXPECT_EQ(rows_of({{"cuda", true}, {"gpus", {gpu, gpu}}}),
            (Rows{{"CUDA", "yes"}, {"GPUs", "NVIDIA H200, NVIDIA H200"}}));
}

TEST(ReportSections, DoNotPutOneRunIntoThePlural) {
  const Table one{"", {{"Run", false}}, {{"a"}}}, two{"", {{"Run", false}}, {{"a"}, {"b"}}};
  EXPECT_EQ(how_to_repeat("", {}, one).tables[1].title, "The run");
  EXPECT_EQ(how_to_repeat("", {}, two).tables[1].title, "All 2 runs");
}

TEST(ReportText, EscapesWhatHtmlReads) {
  EXPECT_EQ(escape("a<b>&\"c'"), "a&lt;b&gt;&amp;&quot;c&#39;");
  EXPECT_EQ(escape("\xff"), "\xef\xbf\xbd");
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
  EXPECT_EQ(plus_minus(spread({0.8, 0.82}), 100), "81.0\u00a0±\u00a01.4");
  EXPECT_EQ(plus_minus(spread({0.8}), 100), "80.0");
  EXPECT_EQ(plus_minus(spread({})), "–");
}

TEST(Report, ShowsItsParts) {
  const auto page = render(small_report());
  for (const char* part :
       {"efla reproduce nothing</p>", "<h1>A title</h1>", "a fact", "a caveat", "a summary",
        "A heading <small>an aside</small>", "<p>a lead</p>", "some text", "a processor", "All 2 runs"}) {
    EXPECT_CONTAINS(page, part);
  }
  EXPECT_CONTAINS(page, "<th scope=\"row\">twenty</th><td class=\"n\">20.0</td>");
  EXPECT_CONTAINS(page, "<th scope=\"row\">1</th><td class=\"n\">2.500 (2.000–3.000)</td><td class=\"n\">5.000</td>");
  EXPECT_CONTAINS(page, "first: 2.500 at 1, 4.000 at 2. second: 5.000 at 1.");
  EXPECT_EQ(count(page, "<li>"), 2U);
}

TEST(Report, LeavesOutWhatIsEmpty) {
  const auto page = render(small_report());
  EXPECT_EQ(count(page, "<section"), 2U);
  EXPECT_EQ(count(page, "<canvas"), 1U);
  EXPECT_LACKS(page, "Left out");
  EXPECT_EQ(count(render({"", ""}), "<section"), 0U);
}

TEST(Report, KeepsHostileNamesAsText) {
  const std::string hostile = "</script><img src=x onerror=alert(1)>{{results}}\xff";
  auto report = small_report();
  const auto scripts = count(render(report), "</script>");
  report.command = report.title = report.caveat = report.summary = hostile;
  report.facts = {hostile};
  auto& section = report.sections[0];
  section.heading = section.aside = section.lead = section.listings[0].text = section.listings[0].title = hostile;
  section.figures[0].title = section.figures[0].x_label = section.figures[0].series[0].label = hostile;
  section.tables[0].title = section.tables[0].columns[0].name = section.tables[0].rows[0][0] = hostile;
  report.results[hostile] = hostile;
  const auto page = render(report);
  EXPECT_EQ(count(page, "</script>"), scripts);
  EXPECT_EQ(count(page, "<img"), 0U);
  EXPECT_EQ(count(page, "onerror=alert(1)>"), count(page, "\\u003cimg src=x onerror=alert(1)>"));
  EXPECT_EQ(count(page, "\xff"), 0U);
}

TEST(Report, WritesResultsAndPage) {
  const test::TempFolder folder;
  const auto page = write(small_report(), folder.path());
  EXPECT_EQ(page, folder.path() / "report.html");
  EXPECT_EQ(io::read_json(folder.path() / "results.json"), json({{"a", 2}, {"b", 1}}));
  EXPECT_CONTAINS(test::read_text(page), "A title");
}

TEST(Report, PrintsTablesOnATerminal) {
  const Table table{"", {{"Näme", false}, {"Value"}}, {{"one", "1.0"}, {"twenty", "20.0 ± 1"}}};
  EXPECT_EQ(as_text(table), "Näme       Value\none          1.0\ntwenty  20.0 ± 1\n");
}

TEST(Report, StylesDifferInColourAndMarker) {
  EXPECT_EQ(category_style(0).color, "--category-0");
  EXPECT_EQ(category_style(7).color, "--category-1");
  EXPECT_TRUE(category_style(7).dashed);
  constexpr int kMarkers = 4;  // of page.js
  std::set<std::tuple<std::string, int, bool>> styles;
  for (std::size_t i = 0; i < 48; ++i) {
    const Style style = category_style(i);
    styles.insert({style.color, style.marker % kMarkers, style.dashed});
  }
  EXPECT_EQ(styles.size(), 48U);
  EXPECT_EQ(ramp_style(0, 3).color, "--ramp-0");
  EXPECT_EQ(ramp_style(1, 3).color, "--ramp-2");
  EXPECT_EQ(ramp_style(2, 3).color, "--ramp-4");
}

}  // namespace
}  // namespace efla::report
