// The report on training runs without a browser: what it says, and runs with parts missing.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "experiments/common/lm_runs.h"
#include "tests/experiments/invented_lm_runs.h"
#include "tests/support/expect_error.h"
#include "tests/support/expect_text.h"
#include "tests/support/temp_folder.h"

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

TEST(LmRuns, OfOtherValidationTokensHaveNoWinner) {
  for (const char* other : {"/data/validation/sha256", "/config/training/evaluate_tokens"}) {
    auto a = invented_lm_run("a", "efla", 1e-3, 1.5), b = invented_lm_run("b", "efla", 1e-3, 1.4);
    b.run[json::json_pointer(other)] = 7;
    const auto page = page_of({a, b});
    EXPECT_LACKS(page, "lowest validation");
    EXPECT_CONTAINS(page, "evaluated on different tokens");
  }
}

TEST(LmRuns, NamesAFolderThatHoldsNone) {
  const test::TempFolder folder;
  const auto says = [&](const std::string& name, const std::string& text) {
    test::expect_io_error([&] { read_lm_run("a", folder.path() / name); }, IoError::Kind::missing, -1, text);
  };
  says("", "holds no run of efla train lm, which has a run.json");
  says("nowhere", "nowhere: there is no such folder");
}

TEST(LmRuns, LeavesOutWhatIsMissing) {
  auto run = invented_lm_run("a<b>", "efla", 1e-3, 1.5);
  run.metrics = {{{"event", "step"}, {"step", 1}, {"tokens", 8}, {"loss", nullptr}},
                 {{"event", "step"}, {"step", 2}, {"tokens", 16}, {"loss", 2.5}},
                 {{"event", "evaluation"}, {"tokens", 16}, {"perplexity", nullptr}}};
  run.run = json::object();
  const auto page = page_of({run});
  EXPECT_CONTAINS(page, "Training of a&lt;b&gt;");
  EXPECT_LACKS(page, "a<b>");
  EXPECT_CONTAINS(page, "Training loss");
  EXPECT_LACKS(page, "lowest validation");
  EXPECT_LACKS(page, "id=\"settings\"");
  EXPECT_LACKS(page, "id=\"samples\"");
  EXPECT_CONTAINS(page_of({{"\xff", json::object(), {}}}), "\xef\xbf\xbd");
}

TEST(LmRuns, OfDamagedFilesAreRefused) {
  const test::TempFolder folder;
  const auto whole = invented_lm_run("a", "efla", 1e-3, 1.5);
  const auto write = [&](const json& run, const std::vector<json>& metrics) {
    test::write_text(folder / "run.json", run.dump());
    std::string lines;
    for (const auto& line : metrics) lines += line.dump() + "\n";
    test::write_text(folder / "metrics.jsonl", lines);
    return lines;
  };
  const auto refused = [&](const std::string& says) {
    test::expect_bad_content([&] { read_lm_run("a", folder.path()); }, -1, says);
  };
  const auto lines = write(whole.run, whole.metrics);
  EXPECT_EQ(read_lm_run("a", folder.path()).metrics, whole.metrics);

  for (const auto& [field, value] : std::vector<std::pair<std::string, json>>{
           {"command", 7}, {"parameters", "many"}, {"parameters", -1}, {"config", 3}, {"environment", json::array()}}) {
    auto run = whole.run;
    run[field] = value;
    write(run, whole.metrics);
    refused("run.json: " + field + ": got " + value.dump() + ", expected ");
    run.erase(field);
    write(run, whole.metrics);
    refused("run.json: " + field + ": got nothing, expected ");
  }
  write(3, whole.metrics);
  refused("run.json: got 3, expected an object");

  const auto in_line = [&](std::size_t line, const std::string& field, const json& value) {
    auto metrics = whole.metrics;
    metrics[line - 1][field] = value;
    write(whole.run, metrics);
    refused("metrics.jsonl: line " + std::to_string(line) + ": " + field + ": got " + value.dump() + ", expected ");
  };
  ASSERT_EQ(whole.metrics[125].at("event"), "evaluation");
  ASSERT_EQ(whole.metrics[252].at("event"), "sample");
  in_line(1, "event", "stop");
  in_line(1, "event", 7);
  in_line(2, "step", "two");
  in_line(2, "tokens", 1.5);
  in_line(3, "seconds", true);
  for (const char* number : {"loss", "lr", "grad_norm", "tokens_per_second"}) in_line(3, number, "high");
  for (const char* number : {"loss", "perplexity", "bits_per_byte"}) in_line(126, number, json::array());
  in_line(253, "text", 3);
  auto metrics = whole.metrics;
  metrics[3].erase("loss");
  write(whole.run, metrics);
  refused("metrics.jsonl: line 4: loss: got nothing, expected a number");
  metrics[3] = 17;
  write(whole.run, metrics);
  refused("metrics.jsonl: line 4: got 17, expected an object");

  write(whole.run, whole.metrics);
  test::write_text(folder / "metrics.jsonl", lines.substr(0, lines.size() - 5));
  refused("metrics.jsonl: line " + std::to_string(whole.metrics.size()) + ": is cut off");
  const auto run = whole.run.dump();
  test::write_text(folder / "run.json", run.substr(0, run.size() - 5));
  test::expect_bad_content([&] { read_lm_run("a", folder.path()); }, static_cast<std::int64_t>(run.size()) - 5,
                           "run.json: ");
}

}  // namespace
}  // namespace efla::experiments
