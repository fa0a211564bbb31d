#include "tests/support/report_check.h"

#include <stdexcept>

namespace efla::test {
namespace {

// For each canvas: its id, how many of its pixels are not fully transparent, the length of its description, the number
// of rows in the table of its figure.
constexpr const char* kCanvases = R"(
  [...document.querySelectorAll("canvas")].map((canvas) => {
    const size = [canvas.width, canvas.height];
    const rgba = size.includes(0) ? [] : canvas.getContext("2d").getImageData(0, 0, ...size).data;
    let inked = 0;
    for (let i = 3; i < rgba.length; i += 4) inked += rgba[i] > 0;
    const figure = canvas.closest("figure");
    return { id: canvas.id, inked, described: (canvas.getAttribute("aria-label") || "").length,
             rows: figure ? figure.querySelectorAll("tbody tr").length : 0 };
  }))";

// A chart of 250 × 150 pixels or more has far more than this in its axes alone.
constexpr int kLeastInk = 500;

}  // namespace

std::vector<std::string> report_faults(Browser& browser, const std::string& path, const View& view) {
  std::vector<std::string> faults;
  try {
    browser.open(path, view, "document.documentElement.dataset.charts !== undefined");
  } catch (const std::runtime_error& e) {
    faults.push_back(e.what());
  }
  for (const auto& line : browser.console()) faults.push_back("console, " + line.level + ": " + line.text);
  for (std::size_t i = 1; i < browser.requests().size(); ++i) faults.push_back("request for " + browser.requests()[i]);

  const auto canvases = browser.evaluate(kCanvases);
  const auto charts = browser.evaluate("document.documentElement.dataset.charts || ''").get<std::string>();
  if (charts != std::to_string(canvases.size())) {
    faults.push_back("data-charts is '" + charts + "' with " + std::to_string(canvases.size()) + " canvases");
  }
  for (const auto& canvas : canvases) {
    const auto name = "canvas " + canvas["id"].get<std::string>();
    if (canvas["inked"] < kLeastInk) faults.push_back(name + " is blank: " + canvas["inked"].dump() + " pixels");
    if (canvas["described"] < 20) faults.push_back(name + " has no description");
    if (canvas["rows"] < 1) faults.push_back(name + " has no table of its numbers");
  }
  const auto width = browser.evaluate("document.documentElement.scrollWidth");
  if (!(width <= view.width)) {
    faults.push_back("the page is " + width.dump() + " pixels wide in a window of " + std::to_string(view.width));
  }
  return faults;
}

}  // namespace efla::test
