#include "experiments/synthetic/scores.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "efla/rule/mixer_preset.h"
#include "efla/rule/step_size.h"
#include "experiments/common/study.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Returns [[mean, deviation], …] by test in per cent, null where the plan has none.
json paper_figures(const json& settings, const std::string& task, const std::string& mixer) {
  return settings.value("figures", json::object()).value(task, json::object()).value(mixer, json());
}

// Runs of one setting that differ in their seed alone.
struct Configuration {
  double lr = 0.0, weight_decay = 0.0;
  std::vector<const ordered_json*> runs;

  // Returns the mean over runs and the first tests, with 0 for a run that diverged.
  double accuracy(std::size_t tests) const {
    double sum = 0.0;
    for (const auto* run : runs) {
      if (run->at("diverged").get<bool>()) continue;
      for (std::size_t i = 0; i < tests; ++i) sum += run->at("tests").at(i).at("accuracy").get<double>();
    }
    return sum / static_cast<double>(runs.size() * tests);
  }
};

// Returns the best configuration of each setting.
std::vector<Configuration> best_of(const std::vector<const ordered_json*>& runs, std::size_t tests) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<Configuration>> settings;
  for (const auto* run : runs) {
    const auto setting = run->at("setting").get<std::string>();
    if (!settings.contains(setting)) order.push_back(setting);
    const double lr = run->at("lr"), weight_decay = run->at("weight_decay");
    auto& tried = settings[setting];
    auto same = std::find_if(tried.begin(), tried.end(),
                             [&](const auto& c) { return c.lr == lr && c.weight_decay == weight_decay; });
    if (same == tried.end()) same = tried.insert(tried.end(), {lr, weight_decay, {}});
    same->runs.push_back(run);
  }
  std::vector<Configuration> best;
  for (const auto& setting : order) {
    const auto& tried = settings[setting];
    best.push_back(*std::max_element(tried.begin(), tried.end(), [tests](const auto& a, const auto& b) {
      return a.accuracy(tests) < b.accuracy(tests);
    }));
  }
  return best;
}

// Returns the mean over settings of each seed's accuracy on a test, without the seeds of runs that diverged.
std::vector<double> by_seed(const std::vector<Configuration>& settings, std::size_t test) {
  std::map<std::uint64_t, double> sums;
  std::map<std::uint64_t, bool> diverged;
  for (const auto& setting : settings) {
    for (const auto* run : setting.runs) {
      const auto seed = run->at("seed").get<std::uint64_t>();
      if (run->at("diverged").get<bool>()) {
        diverged[seed] = true;
      } else {
        sums[seed] += run->at("tests").at(test).at("accuracy").get<double>() / static_cast<double>(settings.size());
      }
    }
  }
  std::vector<double> means;
  for (const auto& [seed, sum] : sums) {
    if (!diverged.contains(seed)) means.push_back(sum);
  }
  return means;
}

// tests: as a run of the task has them, for a mixer of which every run diverged.
ordered_json score_of(const json& plan, const std::string& task, const std::string& mixer,
                      const std::vector<const ordered_json*>& runs, const ordered_json& tests) {
  const auto settings = best_of(runs, plan.value("deciding_tests", std::size_t{1}));
  const auto& first = settings.front();
  const bool same = std::all_of(settings.begin(), settings.end(), [&](const auto& s) {
    return s.lr == first.lr && s.weight_decay == first.weight_decay;
  });
  const auto diverged =
      std::count_if(runs.begin(), runs.end(), [](const auto* r) { return r->at("diverged") == true; });
  ordered_json score{{"task", task},
                     {"mixer", mixer},
                     {"settings", settings.size()},
                     {"seeds", by_seed(settings, 0).size()},
                     {"runs", runs.size()},
                     {"diverged", diverged},
                     {"lr", same ? json(first.lr) : json()},
                     {"weight_decay", same ? json(first.weight_decay) : json()},
                     {"accuracy", ordered_json::array()}};
  const json paper = paper_figures(plan, task, mixer);
  for (std::size_t i = 0; i < tests.size(); ++i) {
    const Spread spread = spread_of(by_seed(settings, i));
    ordered_json point{{"length", tests[i].at("length")}};
    if (tests[i].contains("pairs")) point["pairs"] = tests[i].at("pairs");
    point["mean"] = number_or_null(spread.mean);
    point["std"] = number_or_null(spread.deviation);
    // The deviation of a paper's figure may be missing.
    const auto share = [&](std::size_t which) {
      return i < paper.size() && which < paper[i].size() ? json(paper[i][which].get<double>() / 100.0) : json();
    };
    point["paper"] = share(0);
    point["paper_std"] = share(1);
    score["accuracy"].push_back(point);
  }
  return score;
}

}  // namespace

ordered_json score_runs(const json& settings, const std::vector<ordered_json>& runs) {
  std::vector<std::pair<std::string, std::string>> order;
  std::map<std::pair<std::string, std::string>, std::vector<const ordered_json*>> groups;
  for (const auto& run : runs) {
    const std::pair key{run.at("task").get<std::string>(), run.at("mixer").get<std::string>()};
    if (!groups.contains(key)) order.push_back(key);
    groups[key].push_back(&run);
  }
  auto scores = ordered_json::array();
  for (const auto& key : order) {
    const auto& [task, mixer] = key;
    const auto measured = std::find_if(runs.begin(), runs.end(), [&](const ordered_json& run) {
      return run.at("task") == task && !run.at("tests").empty();
    });
    const auto tests = measured == runs.end() ? ordered_json::array() : measured->at("tests");
    scores.push_back(score_of(settings, task, mixer, groups[key], tests));
  }
  return scores;
}

ordered_json eigenvalues(const std::vector<std::string>& mixers) {
  constexpr int kPoints = 49;
  constexpr double kLargest = 6.0;  // of x where nothing bounds it
  auto curves = ordered_json::object();
  for (const auto& name : mixers) {
    const auto& preset = mixer_preset(name.substr(0, name.find(':')));
    if (preset.softmax || preset.gate != Gate::none || preset.steps_per_token > 1) continue;
    const StepSize step = parse_step_size(std::string(preset.step));
    // A unit key and a sigmoid keep x = β‖k‖² below 1.
    const double largest = preset.qk_l2norm && preset.beta == BetaActivation::sigmoid ? 1.0 : kLargest;
    auto& curve = curves[name] = ordered_json::array();
    for (int i = 0; i < kPoints; ++i) {
      const double x = largest * i / (kPoints - 1);
      curve.push_back({x, 1.0 - preset.erase_scale * gain_alpha(step, x, 1.0)});
    }
  }
  return curves;
}

}  // namespace efla::experiments
