#include "efla/train/synthetic_study.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "efla/nn/layers/mixer_preset.h"
#include "efla/rule/step_size.h"

namespace efla::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

struct PaperFigure {
  std::string_view task, mixer;
  std::vector<std::pair<double, double>> percent;  // mean and deviation (NaN: none is given) by length
};

// Table 2 of the EFLA paper, and table 1 of the exponential-integrator paper: its C1 is kda, C2 kda-exact, C3
// kda-exact-nol2.
const std::vector<PaperFigure>& paper_figures(Study study) {
  static const std::vector<PaperFigure> mad{
      {"compression", "deltanet", {{42.7, NAN}}},       {"compression", "efla", {{43.8, NAN}}},
      {"fuzzy-recall", "deltanet", {{22.2, NAN}}},      {"fuzzy-recall", "efla", {{22.6, NAN}}},
      {"in-context-recall", "deltanet", {{99.9, NAN}}}, {"in-context-recall", "efla", {{100.0, NAN}}},
      {"memorisation", "deltanet", {{29.9, NAN}}},      {"memorisation", "efla", {{32.5, NAN}}},
      {"noisy-recall", "deltanet", {{99.9, NAN}}},      {"noisy-recall", "efla", {{100.0, NAN}}},
      {"selective-copying", "deltanet", {{99.6, NAN}}}, {"selective-copying", "efla", {{99.8, NAN}}}};
  static const std::vector<PaperFigure> extrapolation{
      {"palindrome", "kda", {{11.79, 2.13}, {2.53, 0.41}, {1.81, 0.33}}},
      {"palindrome", "kda-exact", {{16.07, 1.51}, {1.77, 0.31}, {1.38, 0.61}}},
      {"palindrome", "kda-exact-nol2", {{14.96, 1.56}, {1.74, 0.11}, {1.00, 0.40}}},
      {"mqar", "kda", {{99.94, 0.05}, {99.96, 0.05}, {99.95, 0.06}}},
      {"mqar", "kda-exact", {{99.98, 0.01}, {99.99, 0.01}, {99.99, 0.01}}},
      {"mqar", "kda-exact-nol2", {{99.98, 0.00}, {99.99, 0.00}, {100.00, 0.00}}},
      {"stack", "kda", {{98.97, 0.31}, {95.10, 0.79}, {87.99, 1.71}}},
      {"stack", "kda-exact", {{99.46, 0.51}, {96.46, 1.49}, {85.47, 3.87}}},
      {"stack", "kda-exact-nol2", {{99.64, 0.31}, {97.30, 0.83}, {85.01, 6.83}}}};
  static const std::vector<PaperFigure> none;
  return study == Study::mad ? mad : study == Study::extrapolation ? extrapolation : none;
}

const PaperFigure* paper_figure(Study study, std::string_view task, std::string_view mixer) {
  for (const auto& figure : paper_figures(study)) {
    if (figure.task == task && figure.mixer == mixer) return &figure;
  }
  return nullptr;
}

json share(double percent) { return std::isfinite(percent) ? json(percent / 100.0) : json(); }

// Runs of one setting that differ in their seed alone.
struct Configuration {
  double lr = 0.0, weight_decay = 0.0;
  std::vector<const ordered_json*> runs;

  // The mean over runs and the first so many tests; of a run that diverged 0.
  double accuracy(std::size_t tests) const {
    double sum = 0.0;
    for (const auto* run : runs) {
      if (run->at("diverged").get<bool>()) continue;
      for (std::size_t i = 0; i < tests; ++i) sum += run->at("tests").at(i).at("accuracy").get<double>();
    }
    return sum / static_cast<double>(runs.size() * tests);
  }
};

// The tests on which configurations are compared: that of the training length, for MQAR's standard set those of at most
// its longest examples.
std::size_t deciding_tests(Study study) { return study == Study::mqar ? 5 : 1; }

// The best configuration of each setting.
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

// The mean over settings of each seed's accuracy on test i; seeds with a run that diverged are left out.
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

json mean_of(const std::vector<double>& values) {
  if (values.empty()) return {};
  double sum = 0.0;
  for (const double x : values) sum += x;
  return sum / static_cast<double>(values.size());
}

json deviation_of(const std::vector<double>& values) {
  if (values.size() < 2) return {};
  const double mean = mean_of(values);
  double squares = 0.0;
  for (const double x : values) squares += (x - mean) * (x - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

ordered_json score_of(Study study, const std::string& task, const std::string& mixer,
                      const std::vector<const ordered_json*>& runs) {
  const auto settings = best_of(runs, deciding_tests(study));
  const auto& first = settings.front();
  const bool same = std::all_of(settings.begin(), settings.end(), [&](const auto& s) {
    return s.lr == first.lr && s.weight_decay == first.weight_decay;
  });
  const auto diverged =
      std::count_if(runs.begin(), runs.end(), [](const auto* r) { return r->at("diverged") == true; });
  ordered_json score{{"task", task},
                     {"mixer", mixer},
                     {"settings", settings.size()},
                     {"seeds", first.runs.size()},
                     {"runs", runs.size()},
                     {"diverged", diverged},
                     {"lr", same ? json(first.lr) : json()},
                     {"weight_decay", same ? json(first.weight_decay) : json()},
                     {"accuracy", ordered_json::array()}};
  const PaperFigure* paper = paper_figure(study, task, mixer);
  const auto measured =
      std::find_if(first.runs.begin(), first.runs.end(), [](const auto* run) { return !run->at("tests").empty(); });
  if (measured == first.runs.end()) return score;
  const auto& tests = (*measured)->at("tests");
  for (std::size_t i = 0; i < tests.size(); ++i) {
    const auto values = by_seed(settings, i);
    const bool known = paper != nullptr && i < paper->percent.size();
    ordered_json point{{"length", tests[i].at("length")}};
    if (tests[i].contains("pairs")) point["pairs"] = tests[i].at("pairs");
    point["mean"] = mean_of(values);
    point["std"] = deviation_of(values);
    point["paper"] = known ? share(paper->percent[i].first) : json();
    point["paper_std"] = known ? share(paper->percent[i].second) : json();
    score["accuracy"].push_back(point);
  }
  return score;
}

}  // namespace

ordered_json summarize_synthetic(const SyntheticStudyOptions& options, const std::vector<ordered_json>& runs) {
  std::vector<std::pair<std::string, std::string>> order;
  std::map<std::pair<std::string, std::string>, std::vector<const ordered_json*>> groups;
  for (const auto& run : runs) {
    const std::pair key{run.at("task").get<std::string>(), run.at("mixer").get<std::string>()};
    if (!groups.contains(key)) order.push_back(key);
    groups[key].push_back(&run);
  }
  auto scores = ordered_json::array();
  for (const auto& key : order) scores.push_back(score_of(options.study, key.first, key.second, groups[key]));
  return scores;
}

ordered_json eigenvalues(const std::vector<std::string>& mixers) {
  constexpr int kPoints = 49;
  constexpr double kLargest = 6.0;  // of x where nothing bounds it
  auto curves = ordered_json::object();
  for (const auto& name : mixers) {
    const auto& preset = nn::mixer_preset(name);
    if (preset.softmax || preset.gate != nn::Gate::none) continue;
    const StepSize step = parse_step_size(std::string(preset.step));
    // A unit key and a sigmoid keep x = β‖k‖² below 1.
    const double largest = preset.qk_l2norm && preset.beta == nn::BetaActivation::sigmoid ? 1.0 : kLargest;
    auto& curve = curves[name] = ordered_json::array();
    for (int i = 0; i < kPoints; ++i) {
      const double x = largest * i / (kPoints - 1);
      curve.push_back({x, 1.0 - preset.erase_scale * gain_alpha(step, x, 1.0)});
    }
  }
  return curves;
}

}  // namespace efla::train
