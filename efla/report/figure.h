// A chart of a report: its lines, as JSON for the page's script and as HTML with the same numbers in a table.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "efla/report/smnist_study.h"

namespace efla::report {

// How a line looks, so that colour is never the only difference.
struct Style {
  const char* palette;  // "mixer" or "rate": the CSS variables --mixer-0 …
  int color;
  int marker;
  bool dashed;
};

struct Series {
  std::string label;
  Style style;
  Line line;
};

struct Figure {
  enum class Unit { accuracy, loss, number };  // loss: a logarithmic axis where all is above 0

  std::string id;  // of the canvas
  std::string title;
  std::string x_label;
  Unit unit;
  bool log_x;
  bool from_zero;  // accuracy from 0 to 100 % with a line at chance, for panels that are compared with each other
  std::vector<Series> series;
};

nlohmann::json chart_json(const Figure& figure);

// A <figure> with caption, canvas, its description for screen readers, and the numbers in a <details>.
std::string chart_html(const Figure& figure);

// The lines' names with a swatch each, for all the figures of one row.
std::string legend_html(const std::vector<Series>& series);

}  // namespace efla::report
