// Invented results of `efla reproduce smnist`, for tests of the report alone: no model was trained for these figures.
#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/base/random.h"

namespace efla::test {

struct SyntheticStudy {
  std::vector<std::string> mixers{"efla", "deltanet"};
  std::vector<int> seeds{1, 2, 3};
  std::vector<double> rates{0.001, 0.003, 0.01};  // of efla at one layer; the others train at 0.003
  std::vector<int> layers{1, 2};
  double efla_advantage = 1;  // −1 turns the outcome of every test around
};

// Accuracy falls from clean to chance along a logistic curve in strength (1 at the strongest level); a mixer with more
// robustness falls later.
inline double synthetic_accuracy(double clean, double strength, double robustness) {
  const double fall = 1 / (1 + std::exp(9 * (strength - robustness)));
  const double unharmed = 1 / (1 + std::exp(-9 * robustness));
  return 0.1 + (clean - 0.1) * fall / unharmed;
}

inline nlohmann::json synthetic_run(const SyntheticStudy& study, const std::string& mixer, int layers, double lr, int seed) {
  Random random(1000 * static_cast<std::uint64_t>(seed) + static_cast<std::uint64_t>(mixer.size() + layers));
  const auto jitter = [&](double size) { return size * (2 * random.uniform() - 1); };
  const double advantage = (mixer == "efla" ? 0.15 : -0.15) * study.efla_advantage / layers;
  const double clean = 0.962 + 0.008 * layers - 0.02 * std::abs(std::log10(lr / 0.003)) + jitter(0.004);
  const double robustness = 0.6 + advantage + 0.12 * std::log10(lr / 0.003) + jitter(0.03);
  const auto name = mixer + "-l" + std::to_string(layers) + "-lr" + nlohmann::json(lr).dump() + "-s" + std::to_string(seed);
  nlohmann::json run{{"name", name},           {"mixer", mixer},
                     {"layers", layers},       {"lr", lr},
                     {"seed", seed},           {"epochs", 5},
                     {"parameters", 71946 + 20864 * (layers - 1)}, {"images_per_second", 610.0 / layers + jitter(12)},
                     {"train_seconds", 98.0 * layers + jitter(3)}, {"clean_accuracy", clean}};
  for (int step = 10, end = 2350; step <= end; step += 10) {
    const double done = static_cast<double>(step) / end;
    nlohmann::json point{{"step", step}, {"epoch", 5 * done}};
    point["train_loss"] = 0.1 + 2.2 * std::exp(-7 * done) * (1 + jitter(0.2)) + jitter(0.03);
    point["train_accuracy"] = clean * (1 - std::exp(-12 * done));
    if (step % 470 == 0) point["test_accuracy"] = clean - 0.05 * std::exp(-5 * done + 1) + jitter(0.003);
    run["curve"].push_back(point);
  }
  for (const double p : {0.1, 0.2, 0.4, 0.6}) {
    run["dropout"].push_back({{"p", p}, {"accuracy", synthetic_accuracy(clean, p, robustness + 0.1) + jitter(0.01)}});
  }
  for (const double factor : {2.0, 4.0, 8.0, 16.0}) {
    run["scale"].push_back(
        {{"factor", factor}, {"accuracy", synthetic_accuracy(clean, std::log2(factor) / 4, robustness) + jitter(0.01)}});
  }
  for (const double sigma : {0.1, 0.2, 0.4}) {
    run["noise"].push_back(
        {{"sigma", sigma}, {"accuracy", synthetic_accuracy(clean, sigma / 0.4, robustness) + jitter(0.01)}});
  }
  run["command"] = "efla train smnist --mixer " + mixer + " --layers " + std::to_string(layers) + " --data builtin --epochs 5 --lr " +
                   nlohmann::json(lr).dump() + " --seed " + std::to_string(seed) + " --out runs/smnist/" + name;
  return run;
}

// The entry of "mixers": means over the runs of one layer at 0.003.
inline nlohmann::json synthetic_headline(const nlohmann::json& runs, const std::string& mixer) {
  std::vector<const nlohmann::json*> chosen;
  for (const auto& run : runs) {
    if (run["mixer"] == mixer && run["layers"] == 1 && run["lr"] == 0.003) chosen.push_back(&run);
  }
  const auto mean_std = [&](const nlohmann::json::json_pointer& at) {
    const auto n = static_cast<double>(chosen.size());
    double mean = 0, squares = 0;
    for (const auto* run : chosen) mean += run->at(at).get<double>() / n;
    for (const auto* run : chosen) squares += std::pow(run->at(at).get<double>() - mean, 2);
    return std::pair{mean, n > 1 ? std::sqrt(squares / (n - 1)) : 0};
  };
  const auto [clean, clean_std] = mean_std(nlohmann::json::json_pointer("/clean_accuracy"));
  nlohmann::json entry{{"lr", 0.003}, {"layers", 1}, {"clean_accuracy", clean}, {"clean_std", clean_std}};
  for (const auto* run : chosen) entry["seeds"].push_back((*run)["seed"]);
  for (const char* test : {"dropout", "scale", "noise"}) {
    for (std::size_t i = 0; i < (*chosen.front())[test].size(); ++i) {
      auto point = (*chosen.front())[test][i];
      const auto [mean, std] =
          mean_std(nlohmann::json::json_pointer("/" + std::string(test) + "/" + std::to_string(i) + "/accuracy"));
      point["accuracy"] = mean;
      point["std"] = std;
      entry[test].push_back(point);
    }
  }
  return entry;
}

inline nlohmann::json synthetic_results(const SyntheticStudy& study = {}) {
  nlohmann::json results{{"schema", 1},
                         {"command", "efla reproduce smnist --data builtin --seeds 1,2,3 --out runs/smnist"},
                         {"data", "builtin"},
                         {"quick", false}};
  results["environment"] = {{"version", "0.0.0"},     {"commit", "0000000"},  {"compiler", "an invented compiler 1.0"},
                            {"cpu", "invented CPU"},  {"simd_target", "none"}, {"threads", 2},
                            {"libtorch", "0.0"},      {"blas", "none"},        {"date", "2000-01-01"}};
  results["runs"] = nlohmann::json::array();
  for (const auto& mixer : study.mixers) {
    for (const int layers : study.layers) {
      for (const double lr : mixer == "efla" && layers == 1 ? study.rates : std::vector<double>{0.003}) {
        for (const int seed : study.seeds) results["runs"].push_back(synthetic_run(study, mixer, layers, lr, seed));
      }
    }
    results["mixers"][mixer] = synthetic_headline(results["runs"], mixer);
  }
  return results;
}

}  // namespace efla::test
