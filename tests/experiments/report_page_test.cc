// The report in Debian's chromium: the charts draw, the console stays clean, and the page fits a desktop and a phone,
// in light and dark.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/experiments/invented_digits.h"
#include "tests/experiments/invented_lm_runs.h"
#include "tests/experiments/invented_tasks.h"
#include "tests/support/browser.h"
#include "tests/support/report_check.h"

namespace efla::test {
namespace {

using nlohmann::json;
using Faults = std::vector<std::string>;

constexpr View kDesktop{.width = 1280, .height = 900, .dark = false},
    kDesktopDark{.width = 1280, .height = 900, .dark = true}, kPhone{.width = 390, .height = 844, .dark = false},
    kPhoneDark{.width = 390, .height = 844, .dark = true};

class ReportPage : public testing::Test {
 protected:
  static void SetUpTestSuite() { browser_ = std::make_unique<Browser>(); }
  static void TearDownTestSuite() { browser_.reset(); }

  void TearDown() override { std::remove(path_.c_str()); }

  std::string write(const std::string& page) {
    std::ofstream(path_, std::ios::binary) << page;
    return path_;
  }
  std::string render(const report::Report& report) { return write(report::render(report)); }

  static std::unique_ptr<Browser> browser_;
  std::string path_ = testing::TempDir() + "efla_report_page_" + std::to_string(getpid()) + ".html";
};
std::unique_ptr<Browser> ReportPage::browser_;

TEST_F(ReportPage, DrawsEveryChartAtEveryWidthAndTheme) {
  const auto path = render(invented_digit_report());
  for (const auto& view : {kDesktop, kDesktopDark, kPhone, kPhoneDark}) {
    SCOPED_TRACE(std::to_string(view.width) + (view.dark ? " dark" : " light"));
    EXPECT_EQ(report_faults(*browser_, path, view), Faults{});
    EXPECT_EQ(browser_->evaluate("document.documentElement.dataset.charts"), "11");
    EXPECT_EQ(browser_->evaluate("innerWidth"), view.width);
    EXPECT_EQ(browser_->evaluate("getComputedStyle(document.body).backgroundColor"),
              view.dark ? "rgb(20, 24, 29)" : "rgb(255, 255, 255)");
  }
}

TEST_F(ReportPage, OfTrainingRunsDrawsEveryChartAtEveryWidthAndTheme) {
  std::vector<experiments::LmRunRecord> runs;
  for (int i = 0; i < 8; ++i) {
    runs.push_back(invented_lm_run("run-of-language-model-" + std::to_string(i), i % 2 == 0 ? "efla" : "deltanet",
                                   1e-3 * (i + 1), 1.2 + 0.1 * i));
  }
  const auto path = render(experiments::compare_lm_runs(runs));
  for (const auto& view : {kDesktop, kDesktopDark, kPhone, kPhoneDark}) {
    SCOPED_TRACE(std::to_string(view.width) + (view.dark ? " dark" : " light"));
    EXPECT_EQ(report_faults(*browser_, path, view), Faults{});
    EXPECT_EQ(browser_->evaluate("document.documentElement.dataset.charts"), "3");
  }
}

TEST_F(ReportPage, OfSyntheticTasksDrawsEveryChartAtEveryWidthAndTheme) {
  const experiments::Plan plan(experiments::state_tracking_plan(), "state-tracking", "small", {});
  const auto outcome = invented_task_outcome(/*by_length=*/true, {"deltanet", "deltanet-neg"});
  const auto path = render(experiments::synthetic_report(plan, outcome));
  for (const auto& view : {kDesktop, kDesktopDark, kPhone, kPhoneDark}) {
    SCOPED_TRACE(std::to_string(view.width) + (view.dark ? " dark" : " light"));
    EXPECT_EQ(report_faults(*browser_, path, view), Faults{});
    EXPECT_EQ(browser_->evaluate("document.documentElement.dataset.charts"), "5");
  }
}

// Axes alone would pass for a drawn chart: each line, drawn alone so that no other covers it, must leave pixels of its
// own colour.
TEST_F(ReportPage, DrawsEveryLine) {
  browser_->open(render(invented_digit_report()), kDesktop, "document.documentElement.dataset.charts");
  const auto lines = browser_->evaluate(R"(
    [...document.querySelectorAll("#robustness ~ .charts canvas, #rates ~ .charts canvas")].flatMap((canvas) => {
      const chart = Chart.getChart(canvas);
      chart.options.animation = false;
      return chart.data.datasets.filter((set) => set.label).map((set) => {
        for (const other of chart.data.datasets) other.hidden = other !== set;
        chart.update("none");
        const rgba = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const color = [1, 3, 5].map((at) => parseInt(set.borderColor.slice(at, at + 2), 16));
        let pixels = 0;
        for (let i = 0; i < rgba.length; i += 4) {
          pixels += rgba[i + 3] === 255 && color.every((c, k) => Math.abs(c - rgba[i + k]) <= 2);
        }
        return { chart: canvas.id, line: set.label, pixels };
      });
    }))");
  ASSERT_EQ(lines.size(), 12U);  // three panels of two mixers, three of two learning rates
  for (const auto& line : lines) EXPECT_GE(line["pixels"], 100) << line;
}

TEST_F(ReportPage, StacksChartsOnAPhoneAndSetsThemSideBySideOnADesktop) {
  const auto path = render(invented_digit_report());
  const std::string columns =
      "new Set([...document.querySelectorAll('#robustness ~ .charts figure')].map((f) => f.offsetLeft)).size";
  browser_->open(path, kDesktop, "document.documentElement.dataset.charts");
  EXPECT_EQ(browser_->evaluate(columns), 3);
  browser_->open(path, kPhone, "document.documentElement.dataset.charts");
  EXPECT_EQ(browser_->evaluate(columns), 1);
}

// WCAG 2: 4.5 for text, 3 for lines in charts.
TEST_F(ReportPage, HasEnoughContrast) {
  const auto path = render(invented_digit_report());
  for (const auto& view : {kDesktop, kDesktopDark}) {
    browser_->open(path, view, "document.documentElement.dataset.charts");
    const auto contrasts = browser_->evaluate(R"((() => {
      const style = getComputedStyle(document.documentElement);
      const luminance = (name) => {
        const hex = style.getPropertyValue(name).trim().replace(/^#(.)(.)(.)$/, "#$1$1$2$2$3$3");
        const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const contrast = (name) => {
        const [low, high] = [luminance(name), luminance("--page")].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
      };
      const lines = [0, 1, 2, 3, 4, 5].map((i) => "--category-" + i).concat([0, 1, 2, 3, 4].map((i) => "--ramp-" + i));
      return [["--text", 4.5], ["--quiet", 4.5], ["--link", 4.5], ...lines.map((name) => [name, 3])]
        .map(([name, least]) => ({ name, least, contrast: contrast(name) }));
    })())");
    ASSERT_EQ(contrasts.size(), 14U);
    for (const auto& color : contrasts) EXPECT_GE(color["contrast"], color["least"]) << color << view.dark;
  }
}

TEST_F(ReportPage, PrintsLightFromADarkScreen) {
  browser_->open(render(invented_digit_report()), kDesktopDark, "document.documentElement.dataset.charts");
  const std::string line = "Chart.getChart('robustness-scale').data.datasets.find((set) => set.label).borderColor";
  const auto dark = browser_->evaluate(line);
  EXPECT_NE(browser_->evaluate("dispatchEvent(new Event('beforeprint')), " + line), dark);
  EXPECT_EQ(browser_->evaluate("getComputedStyle(document.body).backgroundColor"), "rgb(255, 255, 255)");
  EXPECT_EQ(browser_->evaluate("dispatchEvent(new Event('afterprint')), " + line), dark);
}

TEST_F(ReportPage, KeepsHostileNamesAsText) {
  const std::string hostile = "</script><img src=x onerror=window.broken=1>\"'&{{results}}";
  auto settings = invented_digit_settings();
  settings["mixers"] = {hostile, "efla", "deltanet", std::string(300, 'm')};
  settings["data"] = hostile;
  auto outcome = invented_digit_outcome(settings);
  outcome.command = "efla " + hostile;
  outcome.environment["cpu"] = hostile;
  const auto report = experiments::digit_report(hostile, settings, outcome);
  EXPECT_EQ(report_faults(*browser_, render(report), kPhone), Faults{});
  EXPECT_EQ(browser_->evaluate("window.broken === undefined && document.images.length === 0"), true);
  EXPECT_EQ(browser_->evaluate("document.querySelector('.legend li').textContent"), hostile);
  EXPECT_EQ(browser_->evaluate("document.querySelector('#repeat ~ pre').textContent"), "efla " + hostile);
  EXPECT_EQ(browser_->evaluate("JSON.parse(document.getElementById('results-json').textContent)"),
            json(report.results));
}

TEST_F(ReportPage, DrawsWhatIsThere) {
  auto settings = invented_digit_settings();
  settings["seeds"] = {7};
  settings["lr"] = {0.003};
  settings["layers"] = {1};
  EXPECT_EQ(report_faults(*browser_, render(invented_digit_report(settings)), kPhone), Faults{});
  EXPECT_EQ(browser_->evaluate("document.documentElement.dataset.charts"), "5");
  report::Figure point{"point", "A single point", "level", report::Figure::Unit::accuracy, true, 0.1};
  point.series = {{"one", report::category_style(0), {{2.0, spread_of(std::vector<double>{0.5})}}}};
  EXPECT_EQ(report_faults(*browser_, render({"", "One", {}, "", "", {{"one", "One", "", "", {point}}}}), kPhone),
            Faults{});
  EXPECT_EQ(browser_->evaluate("document.documentElement.dataset.charts"), "1");
  EXPECT_EQ(report_faults(*browser_, render({"", "Nothing"}), kPhone), Faults{});
  EXPECT_EQ(browser_->evaluate("document.documentElement.dataset.charts"), "0");
}

TEST_F(ReportPage, GivesEqualAccuraciesAnAxisFromNoneToAll) {
  for (const double accuracy : {0.0, 1.0}) {
    report::Figure figure{"flat", "The same at every step", "step", report::Figure::Unit::accuracy};
    const Spread spread = spread_of(std::vector<double>{accuracy});
    figure.series = {{"one", report::category_style(0), {{1.0, spread}, {2.0, spread}}}};
    EXPECT_EQ(report_faults(*browser_, render({"", "One", {}, "", "", {{"one", "One", "", "", {figure}}}}), kPhone),
              Faults{});
    const std::string axis = "Chart.getChart('flat').scales.y";
    EXPECT_EQ(browser_->evaluate("[" + axis + ".min, " + axis + ".max]"), (json{0, 1})) << accuracy;
  }
}

TEST_F(ReportPage, KeepsTheLabelsOfAnAxisApart) {
  // As where one run was evaluated every 40,960 tokens and the other run less often.
  report::Figure figure{"uneven", "Two runs", "tokens"};
  const Spread spread = spread_of(std::vector<double>{2.0});
  figure.series = {{"one", report::category_style(0), {{40960, spread}, {81920, spread}, {122866, spread}}},
                   {"two", report::category_style(1), {{33670, spread}, {693412, spread}, {1040000, spread}}}};
  for (const auto& view : {kDesktop, kPhone}) {
    EXPECT_EQ(report_faults(*browser_, render({"", "Two", {}, "", "", {{"two", "Two", "", "", {figure}}}}), view),
              Faults{});
    const auto labels = browser_->evaluate(R"((() => {
      const { scales: { x }, ctx } = Chart.getChart("uneven");
      ctx.font = "12px " + Chart.defaults.font.family;
      return x.ticks.map((tick) => [x.getPixelForValue(tick.value), ctx.measureText(tick.label).width]);
    })())");
    ASSERT_GE(labels.size(), 3U);
    for (std::size_t i = 1; i < labels.size(); ++i) {
      const double between = labels[i][0].get<double>() - labels[i - 1][0].get<double>();
      EXPECT_GT(between, (labels[i][1].get<double>() + labels[i - 1][1].get<double>()) / 2) << labels;
    }
  }
}

TEST_F(ReportPage, ShowsTheWholeOfALongCommand) {
  auto outcome = invented_digit_outcome(invented_digit_settings());
  for (int i = 0; i < 40; ++i) outcome.command += " --set training.lr=0.001";
  outcome.command += " --out " + std::string(300, 'x');
  const auto report = experiments::digit_report("A title", invented_digit_settings(), outcome);
  for (const auto& view : {kDesktop, kPhone}) {
    browser_->open(render(report), view, "document.documentElement.dataset.charts");
    EXPECT_EQ(browser_->evaluate("[...document.querySelectorAll('pre')].every((p) => p.scrollWidth <= p.clientWidth)"),
              true);
  }
}

// The check itself: a page with every fault that it looks for.
TEST_F(ReportPage, CheckFindsFaults) {
  const auto path = write(
      "<html data-charts=2><img src='http://localhost:9/x.png'><p style='width:2000px'>wide<canvas id=blank></canvas>"
      "<script>console.warn('a warning'); console.log('a note'); throw new Error('an exception')</script></html>");
  std::string all;
  for (const auto& fault : report_faults(*browser_, path, kPhone)) all += fault + "\n";
  for (const char* fault :
       {"console, warning: a warning", "console, log: a note", "an exception", "request for http://localhost:9/x.png",
        "data-charts is '2' with 1 canvases", "canvas blank is blank: 0 pixels", "has no description", "has no table",
        "pixels wide in a window of 390"}) {
    EXPECT_NE(all.find(fault), std::string::npos) << fault << " is not in:\n" << all;
  }
}

}  // namespace
}  // namespace efla::test
