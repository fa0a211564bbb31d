#include "efla/train/study.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "efla/base/error.h"
#include "efla/eval/perturb.h"
#include "efla/train/distinct.h"

namespace efla::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

template <class T>
void require_values(const char* name, const std::vector<T>& values) {
  if (values.empty()) throw Error("reproduce", name, "an empty list", "at least one value");
  require_distinct(name, values);
}

double headline_lr(const StudyOptions& options) { return *std::max_element(options.lrs.begin(), options.lrs.end()); }

StudyRun study_run(const std::string& mixer, std::int64_t layers, double lr, std::uint64_t seed) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", lr);
  return {mixer + "-layers" + std::to_string(layers) + "-lr" + text + "-seed" + std::to_string(seed), mixer, layers, lr,
          seed};
}

struct Spread {
  double mean = 0.0;
  json std;  // null for one value
};

Spread spread_of(const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  double sum = 0.0, squares = 0.0;
  for (const double x : values) sum += x;
  for (const double x : values) squares += (x - sum / n) * (x - sum / n);
  return {sum / n, values.size() > 1 ? json(std::sqrt(squares / (n - 1.0))) : json()};
}

ordered_json average_panel(const eval::Panel& panel, const std::vector<const ordered_json*>& runs) {
  auto points = ordered_json::array();
  for (std::size_t level = 0; level < panel.levels.size(); ++level) {
    std::vector<double> accuracy;
    for (const auto* run : runs) accuracy.push_back(run->at(std::string(panel.name)).at(level).at("accuracy"));
    const Spread spread = spread_of(accuracy);
    points.push_back(
        {{std::string(panel.level_name), panel.levels[level]}, {"accuracy", spread.mean}, {"std", spread.std}});
  }
  return points;
}

}  // namespace

std::vector<StudyRun> plan_study(const StudyOptions& options) {
  require_values("mixers", options.mixers);
  require_values("seeds", options.seeds);
  require_values("lr", options.lrs);
  require_values("layers", options.layers);
  const double best = headline_lr(options);
  std::vector<StudyRun> runs;
  for (const auto seed : options.seeds) {
    for (const auto& mixer : options.mixers) runs.push_back(study_run(mixer, options.layers.front(), best, seed));
  }
  for (const double lr : options.lrs) {
    if (lr == best) continue;
    for (const auto& mixer : options.mixers) {
      if (options.first_mixer_lrs && mixer != options.mixers.front()) continue;
      runs.push_back(study_run(mixer, options.layers.front(), lr, options.seeds.front()));
    }
  }
  for (const auto layers : options.layers) {
    if (layers == options.layers.front()) continue;
    for (const auto& mixer : options.mixers) runs.push_back(study_run(mixer, layers, best, options.seeds.front()));
  }
  return runs;
}

ordered_json training_curve(const std::vector<json>& metrics, std::int64_t steps_per_epoch, std::int64_t points) {
  std::int64_t epochs = 1;
  for (const auto& line : metrics) epochs = std::max(epochs, line.at("epoch").get<std::int64_t>());
  const std::int64_t stretches = std::clamp(points / epochs, std::int64_t{1}, steps_per_epoch);  // an epoch
  auto curve = ordered_json::array();
  double loss = 0.0, accuracy = 0.0, count = 0.0;
  for (const auto& line : metrics) {
    if (line.at("event") == "evaluation") {
      if (!curve.empty()) curve.back()["test_accuracy"] = line.at("accuracy");
      continue;
    }
    loss += line.at("loss").get<double>();
    accuracy += line.at("accuracy").get<double>();
    count += 1.0;
    const auto step = line.at("step").get<std::int64_t>();
    const std::int64_t in_epoch = (step - 1) % steps_per_epoch;
    if ((in_epoch + 1) * stretches / steps_per_epoch == in_epoch * stretches / steps_per_epoch) continue;
    curve.push_back({{"step", step},
                     {"epoch", static_cast<double>(step) / static_cast<double>(steps_per_epoch)},
                     {"train_loss", loss / count},
                     {"train_accuracy", accuracy / count}});
    loss = accuracy = count = 0.0;
  }
  return curve;
}

ordered_json summarize(const StudyOptions& options, const std::vector<ordered_json>& runs) {
  ordered_json mixers;
  for (const auto& mixer : options.mixers) {
    std::vector<const ordered_json*> chosen;
    for (const auto& run : runs) {
      if (run.at("mixer") == mixer && run.at("layers") == options.layers.front() &&
          run.at("lr") == headline_lr(options)) {
        chosen.push_back(&run);
      }
    }
    auto& entry = mixers[mixer] = {{"lr", headline_lr(options)}, {"layers", options.layers.front()}};
    std::vector<double> clean;
    for (const auto* run : chosen) {
      entry["seeds"].push_back(run->at("seed"));
      clean.push_back(run->at("clean_accuracy"));
    }
    const Spread spread = spread_of(clean);
    entry["clean_accuracy"] = spread.mean;
    entry["clean_std"] = spread.std;
    for (const auto& panel : eval::robustness_panels()) entry[std::string(panel.name)] = average_panel(panel, chosen);
  }
  return mixers;
}

}  // namespace efla::train
