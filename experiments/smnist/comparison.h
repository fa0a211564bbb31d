// The runs of the study of digits, grouped by configuration, and two groups set side by side.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/report/report.h"

namespace efla::experiments {

// The runs that share mixer, layers and learning rate. Accuracies are shares in [0, 1]; panels are
// eval::robustness_panels(), whose first level leaves the images as they are. Without runs means are NaN and lines
// empty.
struct Group {
  std::string mixer;
  int layers = 0;
  double lr = 0.0;
  std::vector<nlohmann::json> runs = {};  // entries of results.json, of runs that did not diverge
  std::size_t diverged = 0;               // number of runs that did

  std::size_t seeds() const { return runs.size() + diverged; }
  Spread of(const char* key) const;
  Spread accuracy(std::size_t panel, std::size_t level) const;
  // Returns each run's mean over the levels but the first, then the spread over runs.
  Spread mean_accuracy(std::size_t panel) const;
  report::Line line(std::size_t panel) const;
  // Returns the means over the runs' curves, of the points that have both.
  report::Line curve(const char* x, const char* y) const;
};

// Returns the groups in the order of their first runs.
std::vector<Group> groups_of(const std::vector<nlohmann::ordered_json>& runs);

// Two spreads side by side. chance: both guess. even: the difference is not beyond_spread.
enum class Verdict { ahead, behind, even, chance };
Verdict verdict(const Spread& a, const Spread& b);

// One panel, a against b: at the strongest level, and in the mean over all levels but the first.
struct Comparison {
  std::size_t panel;
  Spread strongest[2], mean[2];
};
std::vector<Comparison> compare(const Group& a, const Group& b);

}  // namespace efla::experiments
