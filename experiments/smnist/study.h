// The study of digits read pixel by pixel: which runs it has, and how one is trained and measured.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "experiments/common/plan.h"
#include "experiments/common/study.h"

namespace efla::experiments {

struct DigitRun {
  std::string name;  // "efla-layers1-lr0.003-seed1"
  std::string mixer;
  std::int64_t layers = 1;
  double lr = 0.0;
  std::uint64_t seed = 0;
};

// Returns the runs of the settings of smnist/plan.toml.
std::vector<DigitRun> plan_digit_runs(const nlohmann::json& settings);

// Returns the curve of a run from its metrics.jsonl: [{"step", "epoch", "train_loss", "train_accuracy",
// "test_accuracy"}], at most `points` means over equal stretches of the steps of every epoch, with test_accuracy only
// where an evaluation follows. epoch is step / steps_per_epoch.
nlohmann::ordered_json training_curve(const std::vector<nlohmann::json>& metrics, std::int64_t steps_per_epoch,
                                      std::int64_t points);

// Returns the study on images of `data`: "builtin", or a folder with MNIST's files.
Study digit_study(const Plan& plan, const std::string& data);

}  // namespace efla::experiments
