// The page that shows a study of robustness on pixel-sequence digits.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace efla::report {

// One HTML page, complete in itself (style, script, Chart.js and the results are inside; it loads nothing): what
// `efla reproduce smnist` writes beside results.json. Results of schema 1; sections whose figures are missing are left
// out, and names are shown as they are, whatever characters they hold. Once its charts are drawn, the page sets
// data-charts on its root element to their number. Throws efla::Error where results is not an object or of another
// schema.
std::string render_smnist_report(const nlohmann::json& results);

}  // namespace efla::report
