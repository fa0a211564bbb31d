#include "experiments/smnist/comparison.h"

#include <algorithm>
#include <map>

#include "efla/eval/perturb.h"

namespace efla::experiments {
namespace {

using nlohmann::json;

constexpr double kChance = 0.15;  // guessing among ten classes, with room for luck

double accuracy_of(const json& run, std::size_t panel, std::size_t level) {
  return run.at(std::string(eval::robustness_panels()[panel].name)).at(level).at("accuracy");
}

template <class Value>
Spread spread_over(const std::vector<json>& runs, const Value& value) {
  std::vector<double> values;
  for (const auto& run : runs) values.push_back(value(run));
  return spread_of(values);
}

}  // namespace

Spread Group::of(const char* key) const {
  return spread_over(runs, [&](const json& run) { return run.at(key).get<double>(); });
}

Spread Group::accuracy(std::size_t panel, std::size_t level) const {
  return spread_over(runs, [&](const json& run) { return accuracy_of(run, panel, level); });
}

Spread Group::mean_accuracy(std::size_t panel) const {
  const std::size_t levels = eval::robustness_panels()[panel].levels.size();
  return spread_over(runs, [&](const json& run) {
    double sum = 0.0;
    for (std::size_t level = 1; level < levels; ++level) sum += accuracy_of(run, panel, level);
    return sum / static_cast<double>(levels - 1);
  });
}

report::Line Group::line(std::size_t panel) const {
  const auto& levels = eval::robustness_panels()[panel].levels;
  report::Line line;
  if (runs.empty()) return line;
  for (std::size_t i = 0; i < levels.size(); ++i) line.push_back({levels[i], accuracy(panel, i)});
  return line;
}

report::Line Group::curve(const char* x, const char* y) const {
  std::map<double, std::vector<double>> samples;
  for (const auto& run : runs) {
    for (const auto& point : run.at("curve")) {
      if (point.contains(y)) samples[point.at(x)].push_back(point.at(y));
    }
  }
  report::Line line;
  for (const auto& [at, values] : samples) line.push_back({at, spread_of(values)});
  return line;
}

std::vector<Group> groups_of(const std::vector<nlohmann::ordered_json>& runs) {
  std::vector<Group> groups;
  for (const json run : runs) {
    const Group wanted{run.at("mixer"), run.at("layers"), run.at("lr")};
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& known) {
      return known.mixer == wanted.mixer && known.layers == wanted.layers && known.lr == wanted.lr;
    });
    if (group == groups.end()) group = groups.insert(group, wanted);
    if (run.value("diverged", false)) {
      ++group->diverged;
    } else {
      group->runs.push_back(run);
    }
  }
  return groups;
}

Verdict verdict(const Spread& a, const Spread& b) {
  if (a.mean < kChance && b.mean < kChance) return Verdict::chance;
  if (!beyond_spread(a, b)) return Verdict::even;
  return a.mean > b.mean ? Verdict::ahead : Verdict::behind;
}

std::vector<Comparison> compare(const Group& a, const Group& b) {
  std::vector<Comparison> all;
  for (std::size_t i = 0; i < eval::robustness_panels().size(); ++i) {
    const std::size_t last = eval::robustness_panels()[i].levels.size() - 1;
    all.push_back({i, {a.accuracy(i, last), b.accuracy(i, last)}, {a.mean_accuracy(i), b.mean_accuracy(i)}});
  }
  return all;
}

}  // namespace efla::experiments
