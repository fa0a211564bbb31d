// The page that compares training runs of language models.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace efla::report {

// A run as its folder has it: run.json and the lines of metrics.jsonl (docs/training.md).
struct LmRunRecord {
  std::string name;
  nlohmann::json run;
  std::vector<nlohmann::json> metrics;
};

// One HTML page, complete in itself: loss and evaluation over tokens, a table of what came out, and where the
// configurations differ. What is missing or not a number in a run is left out; names and samples are shown as they are,
// whatever characters they hold.
std::string render_lm_report(const std::vector<LmRunRecord>& runs);

}  // namespace efla::report
