// The study of sequential MNIST (section 5.1 and appendix C of the EFLA paper): which runs it has, and its results.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace efla::train {

struct StudyOptions {
  std::vector<std::string> mixers{"efla", "deltanet"};
  std::vector<std::uint64_t> seeds{1, 2, 3};
  std::vector<double> lrs{3e-3, 1e-3, 1e-4};  // the highest is the headline's
  std::vector<std::int64_t> layers{1, 2};     // the first is the headline's
  bool first_mixer_lrs = false;               // the other learning rates for the first mixer only
};

struct StudyRun {
  std::string name;  // "efla-layers1-lr0.003-seed1"
  std::string mixer;
  std::int64_t layers = 1;
  double lr = 0.0;
  std::uint64_t seed = 0;
};

// The headline configuration of every mixer with every seed; then, with the first seed only, the other learning rates
// and the other numbers of layers. Throws Error for an empty list, and for a value given twice.
std::vector<StudyRun> plan_study(const StudyOptions& options);

// A run's curve from its metrics.jsonl: [{"step", "epoch", "train_loss", "train_accuracy", "test_accuracy"}], at most
// `points` means over equal stretches of every epoch's steps, test_accuracy only where an evaluation follows. epoch
// counts in parts: step / steps_per_epoch.
nlohmann::ordered_json training_curve(const std::vector<nlohmann::json>& metrics, std::int64_t steps_per_epoch,
                                      std::int64_t points);

// The "mixers" of results.json: for every mixer the runs of its headline configuration, averaged over seeds: lr,
// layers, seeds, clean_accuracy, clean_std and the three panels. std is over n − 1, null for one seed. `runs` are the
// entries of results.json's "runs".
nlohmann::ordered_json summarize(const StudyOptions& options, const std::vector<nlohmann::ordered_json>& runs);

}  // namespace efla::train
