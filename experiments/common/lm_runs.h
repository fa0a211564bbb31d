// Training runs of language models, side by side in a report.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/report/report.h"

namespace efla::experiments {

// A run as its folder holds it: run.json and the lines of metrics.jsonl (docs/training.md).
struct LmRunRecord {
  std::string name;
  nlohmann::json run;
  std::vector<nlohmann::json> metrics;
};

// Reads a run's folder. Throws IoError for a file that is cut off and for a field that is missing or of another type.
LmRunRecord read_lm_run(const std::string& name, const std::filesystem::path& folder);

// Returns the training loss by tokens, as means over neighbouring steps.
report::Line loss_curve(const std::vector<nlohmann::json>& metrics);

// Returns loss and evaluation over tokens, a table of results, the differences of the configurations, samples,
// environments and commands. A number that is not finite is left out.
report::Report compare_lm_runs(const std::vector<LmRunRecord>& runs);

}  // namespace efla::experiments
