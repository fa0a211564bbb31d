#include "efla/report/smnist_study.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

namespace efla::report {
namespace {

using nlohmann::json;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const json& member(const json& object, const char* key) {
  static const json none;
  if (!object.is_object()) return none;
  const auto it = object.find(key);
  return it == object.end() ? none : *it;
}

double number(const json& object, const char* key, double missing = kNaN) {
  const auto& value = member(object, key);
  return value.is_number() && std::isfinite(value.get<double>()) ? value.get<double>() : missing;
}

std::string text(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.is_null() ? "" : value.dump(-1, ' ', false, json::error_handler_t::replace);
}

int layer_count(const json& object) {
  const double layers = number(object, "layers", 0);
  return layers >= 1 && layers < 1000 ? static_cast<int>(layers) : 0;
}

using Samples = std::map<double, std::vector<double>>;  // x → one value a seed

// Adds the points (x, y) of one run's list, where both are numbers.
void collect(const json& list, const char* x, const char* y, Samples& samples) {
  if (!list.is_array()) return;
  for (const auto& entry : list) {
    const double at = number(entry, x), value = number(entry, y);
    if (std::isfinite(at) && std::isfinite(value)) samples[at].push_back(value);
  }
}

Line line_of(const Samples& samples) {
  Line line;
  for (const auto& [x, values] : samples) line.push_back({x, spread_of(values)});
  return line;
}

std::vector<double> numbers(const std::vector<const json*>& runs, const char* key) {
  std::vector<double> values;
  for (const auto* run : runs) values.push_back(number(*run, key));
  std::erase_if(values, [](double v) { return !std::isfinite(v); });
  return values;
}

Group group_of(const std::vector<const json*>& runs) {
  Group group;
  group.mixer = text(member(*runs.front(), "mixer"));
  group.layers = layer_count(*runs.front());
  group.lr = number(*runs.front(), "lr", 0);
  group.clean = spread_of(numbers(runs, "clean_accuracy"));
  group.images_per_second = spread_of(numbers(runs, "images_per_second"));
  for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
    Samples samples;
    for (const auto* run : runs) {
      Samples levels;
      collect(member(*run, kPerturbations[i].key), kPerturbations[i].level, "accuracy", levels);
      levels.erase(kPerturbations[i].clean);
      auto& accuracies = group.perturbed_runs[i].emplace_back();
      for (const auto& [level, values] : levels) {
        accuracies[level] = values.front();
        samples[level].insert(samples[level].end(), values.begin(), values.end());
      }
    }
    group.perturbed[i] = line_of(samples);
  }
  Samples accuracy, loss;
  for (const auto* run : runs) {
    group.seeds.push_back(text(member(*run, "seed")));
    collect(member(*run, "curve"), "epoch", "test_accuracy", accuracy);
    collect(member(*run, "curve"), "step", "train_loss", loss);
  }
  group.accuracy_by_epoch = line_of(accuracy);
  group.loss_by_step = line_of(loss);
  return group;
}

// A mean and a standard deviation without the figures behind them.
Spread given(double mean, double std, int count) {
  const double half = std::isfinite(std) ? std : 0;
  return {mean, count > 1 ? std : kNaN, mean - half, mean + half, count};
}

// A mixer's entry under "mixers", for results without the runs.
Group group_of(const std::string& mixer, const json& entry) {
  Group group;
  group.mixer = mixer;
  group.layers = layer_count(entry);
  group.lr = number(entry, "lr", 0);
  if (const auto& seeds = member(entry, "seeds"); seeds.is_array()) {
    for (const auto& seed : seeds) group.seeds.push_back(text(seed));
  }
  const int count = std::max<int>(1, static_cast<int>(group.seeds.size()));
  group.clean = given(number(entry, "clean_accuracy"), number(entry, "clean_std"), count);
  group.images_per_second = spread_of({});
  for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
    const auto& list = member(entry, kPerturbations[i].key);
    Samples means, stds;
    collect(list, kPerturbations[i].level, "accuracy", means);
    collect(list, kPerturbations[i].level, "std", stds);
    means.erase(kPerturbations[i].clean);
    for (const auto& [x, values] : means) {
      group.perturbed[i].push_back({x, given(values.front(), stds.contains(x) ? stds[x].front() : kNaN, count)});
    }
  }
  return group;
}

bool same_configuration(const Group& a, const Group& b) {
  return a.mixer == b.mixer && a.layers == b.layers && std::abs(a.lr - b.lr) <= 1e-9 * std::abs(b.lr);
}

// The configuration that "mixers" names, with its runs where they are there. Without an entry, the best by clean
// accuracy of those with the fewest layers.
Group headline_of(const std::string& mixer, const json& entry, const std::vector<Group>& groups) {
  if (entry.is_object()) {
    const auto chosen = group_of(mixer, entry);
    const auto match = std::find_if(groups.begin(), groups.end(),
                                    [&](const Group& group) { return same_configuration(group, chosen); });
    return match == groups.end() ? chosen : *match;
  }
  const Group* best = nullptr;
  for (const auto& group : groups) {
    if (group.mixer != mixer) continue;
    if (!best || (group.layers == best->layers && group.clean.mean > best->clean.mean)) best = &group;
  }
  return best ? *best : group_of(mixer, entry);
}

// efla and deltanet first, the others as they come.
std::vector<std::string> mixers_of(const json& mixers, const json& runs) {
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  if (runs.is_array()) {
    for (const auto& run : runs) add(text(member(run, "mixer")));
  }
  if (mixers.is_object()) {
    for (const auto& [name, entry] : mixers.items()) add(name);
  }
  const auto rank = [](const std::string& name) { return name == "efla" ? 0 : name == "deltanet" ? 1 : 2; };
  std::stable_sort(names.begin(), names.end(), [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  return names;
}

}  // namespace

Spread spread_of(const std::vector<double>& values) {
  if (values.empty()) return {kNaN, kNaN, kNaN, kNaN, 0};
  const auto n = static_cast<double>(values.size());
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  double sum = 0, squares = 0;
  for (const double v : values) sum += v;
  for (const double v : values) squares += (v - sum / n) * (v - sum / n);
  return {sum / n, values.size() > 1 ? std::sqrt(squares / (n - 1)) : kNaN, *low, *high,
          static_cast<int>(values.size())};
}

Study read_study(const json& results) {
  const auto& mixers = member(results, "mixers");
  const auto& runs = member(results, "runs");
  Study study;
  study.mixers = mixers_of(mixers, runs);

  // The place of the mixer, layers, learning rate: the order of the groups.
  std::map<std::tuple<std::ptrdiff_t, int, double>, std::vector<const json*>> configurations;
  if (runs.is_array()) {
    for (const auto& run : runs) {
      const auto place = std::find(study.mixers.begin(), study.mixers.end(), text(member(run, "mixer")));
      if (place == study.mixers.end()) continue;
      configurations[{place - study.mixers.begin(), layer_count(run), number(run, "lr", 0)}].push_back(&run);
    }
  }
  for (const auto& [key, list] : configurations) study.groups.push_back(group_of(list));

  for (const auto& name : study.mixers)
    study.headline.push_back(headline_of(name, member(mixers, name.c_str()), study.groups));
  return study;
}

Line with_clean(const Group& group, std::size_t perturbation) {
  Line line = group.perturbed[perturbation];
  if (group.clean.count > 0 && std::isfinite(group.clean.mean)) {
    line.push_back({kPerturbations[perturbation].clean, group.clean});
    std::sort(line.begin(), line.end(), [](const Point& a, const Point& b) { return a.x < b.x; });
  }
  return line;
}

}  // namespace efla::report
