// A figure as JSON for the page's script, and as HTML with the same numbers in a table.
#pragma once

#include "efla/report/report.h"

namespace efla::report {

nlohmann::ordered_json chart_json(const Figure& figure);

// Returns a <figure> with caption, canvas, its description for screen readers, and the numbers in a <details>.
std::string chart_html(const Figure& figure);

// Returns the names of the lines of all the figures, each once, with a swatch.
std::string legend_html(const std::vector<Figure>& figures);

}  // namespace efla::report
