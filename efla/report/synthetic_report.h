// The page that shows a study of synthetic tasks.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace efla::report {

// One HTML page, complete in itself: what `efla reproduce mad`, `extrapolation` and `state-tracking` write beside
// results.json. Accuracies beside the papers', by length and while training, and eigenvalues where the results have
// them. Results of schema 1; sections whose figures are missing are left out, and names are shown as they are. Throws
// efla::Error where results is not an object or of another schema.
std::string render_synthetic_report(const nlohmann::json& results);

}  // namespace efla::report
