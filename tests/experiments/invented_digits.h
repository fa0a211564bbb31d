// Invented runs of `efla reproduce smnist`, for tests of the report alone: no model was trained for these figures.
#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/eval/perturb.h"
#include "experiments/smnist/report.h"
#include "experiments/smnist/study.h"

namespace efla::test {

inline nlohmann::json invented_digit_settings() {
  return {{"scale", "full"},         {"mixers", {"efla", "deltanet"}},
          {"seeds", {1, 2, 3}},      {"lr", {0.001, 0.003}},
          {"layers", {1, 2}},        {"first_mixer_rates", true},
          {"training", {}},          {"data", "builtin"},
          {"train_images", 20000},   {"test_images", 2000},
          {"data_digest", "0123abc"}};
}

// The entry of results.json of a run whose accuracy at a level of a panel is what accuracy(panel, level) says.
template <class Accuracy>
nlohmann::ordered_json invented_digit_run(const experiments::DigitRun& run, const Accuracy& accuracy) {
  nlohmann::ordered_json entry{{"name", run.name},
                               {"mixer", run.mixer},
                               {"layers", run.layers},
                               {"lr", run.lr},
                               {"seed", run.seed},
                               {"epochs", 5},
                               {"parameters", 71946 + 20864 * (run.layers - 1)},
                               {"images_per_second", 610.0 / static_cast<double>(run.layers)},
                               {"train_seconds", 98.0 * static_cast<double>(run.layers)}};
  for (int step = 10, end = 2350; step <= end; step += 10) {
    const double done = static_cast<double>(step) / end;
    nlohmann::ordered_json point{{"step", step}, {"epoch", 5 * done}};
    point["train_loss"] = 0.1 + 2.2 * std::exp(-7 * done) * (1 + 0.1 * std::sin(step));
    point["train_accuracy"] = 1 - std::exp(-12 * done);
    if (step % 470 == 0) point["test_accuracy"] = 0.96 - 0.05 * std::exp(-5 * done + 1);
    entry["curve"].push_back(point);
  }
  entry["command"] = "efla train smnist --out " + run.name;
  entry["clean_accuracy"] = accuracy(0, 0);
  const auto& panels = eval::robustness_panels();
  for (std::size_t panel = 0; panel < panels.size(); ++panel) {
    for (std::size_t level = 0; level < panels[panel].levels.size(); ++level) {
      entry[std::string(panels[panel].name)].push_back(
          {{std::string(panels[panel].level_name), panels[panel].levels[level]}, {"accuracy", accuracy(panel, level)}});
    }
  }
  return entry;
}

// A finished study: accuracies fall from clean to chance along a logistic curve, efla's later than the others'.
inline experiments::Outcome invented_digit_outcome(const nlohmann::json& settings) {
  experiments::Outcome outcome{{}, "efla reproduce smnist --out runs/smnist", {}};
  outcome.environment = {{"version", "0.0.0"}, {"commit", "0000000"}, {"cpu", "invented CPU"}, {"date", "2000-01-01"}};
  for (const auto& run : experiments::plan_digit_runs(settings)) {
    Random random(1000 * run.seed + run.mixer.size() + static_cast<std::uint64_t>(run.layers));
    const double clean = 0.962 + 0.008 * static_cast<double>(run.layers) - 0.02 * std::abs(std::log10(run.lr / 0.003));
    const double robustness = (run.mixer == "efla" ? 0.75 : 0.45) + 0.12 * std::log10(run.lr / 0.003);
    outcome.runs.push_back(invented_digit_run(run, [&](std::size_t panel, std::size_t level) {
      if (level == 0) return clean;
      const auto levels = static_cast<double>(eval::robustness_panels()[panel].levels.size());
      const double strength = static_cast<double>(level) / (levels - 1);
      const double accuracy = 0.1 + (clean - 0.1) / (1 + std::exp(9 * (strength - robustness)));
      return accuracy + 0.02 * random.uniform();
    }));
  }
  return outcome;
}

inline report::Report invented_digit_report(const nlohmann::json& settings = invented_digit_settings()) {
  return experiments::digit_report("A title", settings, invented_digit_outcome(settings));
}

}  // namespace efla::test
