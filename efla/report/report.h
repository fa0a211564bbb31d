// A report: figures, tables and notes, written as results.json and as one HTML page. The code that measured something
// builds the report.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "efla/base/statistics.h"

namespace efla::report {

struct Point {
  double x;
  Spread y;
};
using Line = std::vector<Point>;  // ascending x

// How a line looks, so that colour is never the only difference.
struct Style {
  std::string color;  // a CSS variable of page.css, "--category-0"
  int marker = 0;
  bool dashed = false;
};

// Returns the style of the i-th of things without an order, such as mixers.
Style category_style(std::size_t i);

// Returns the style of the i-th of n things with an order, such as learning rates.
Style ramp_style(std::size_t i, std::size_t n);

struct Series {
  std::string label;
  Style style;
  Line line;
};

struct Figure {
  enum class Unit { accuracy, loss, number };  // accuracy: in [0, 1]; loss: a logarithmic axis where all is above 0

  std::string id;  // of its HTML element
  std::string title;
  std::string x_label;
  Unit unit = Unit::number;
  bool log_x = false;
  std::optional<double> chance = {};  // a dashed line at this value, on an axis from 0 to 1
  std::vector<Series> series = {};    // without any the figure is left out
};

struct Column {
  std::string name;
  bool number = true;  // aligned at the right
};

// Cells are text; the first column heads the rows. Without rows the table is left out.
struct Table {
  std::string title;
  std::vector<Column> columns;
  std::vector<std::vector<std::string>> rows = {};
  bool folded = false;  // behind its title
};

// Text as it stands: commands, samples. Without text it is left out.
struct Listing {
  std::string title;  // "" for none
  std::string text;
  bool folded = false;
};

// A section. Without figures, tables and listings it is left out.
struct Section {
  std::string id;  // of its HTML element
  std::string heading;
  std::string aside;  // small, beside the heading
  std::string lead;   // a paragraph
  std::vector<Figure> figures = {};
  std::vector<Table> tables = {};
  std::vector<Listing> listings = {};
};

struct Report {
  std::string command;  // that makes such reports
  std::string title;
  std::vector<std::string> facts = {};  // in one line under the title
  std::string caveat = {};              // what the figures cannot be taken for
  std::string summary = {};
  std::vector<Section> sections = {};
  nlohmann::ordered_json results = {};  // results.json, which the page holds too
};

// Returns the section that says how to repeat a study: its command, environment and runs.
Section how_to_repeat(const std::string& command, const nlohmann::json& environment, Table runs);

// Returns the page, complete in itself: style, script, Chart.js and the results are inside, and it loads nothing. Bytes
// that are not UTF-8 become U+FFFD. When all charts are drawn, the page sets data-charts on its root element to their
// number.
std::string render(const Report& report);

// Writes results.json and report.html into a folder that exists. Returns the page's path.
std::filesystem::path write(const Report& report, const std::filesystem::path& folder);

// Returns a table as lines of a terminal.
std::string as_text(const Table& table);

}  // namespace efla::report
