// One training run on a synthetic task in a folder of its own: an interrupted run continues to the same bits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "efla/nn/models/sequence_model.h"
#include "efla/train/tasks/sequence_task.h"
#include "experiments/common/study.h"

namespace efla::experiments {

struct SyntheticRun {
  std::string name;     // of its folder: "stack-kda-lr0.001-wd0.01-seed42"
  std::string task;     // in the study's table
  std::string setting;  // of the task: what differs from its baseline, "" for the baseline
  std::string mixer;    // as the plan lists it: a name, or NAME:N for N steps per token
  data::synthetic::Task training_task;
  std::vector<data::synthetic::Task> test_tasks;  // the first is measured during training too
  std::int64_t test_examples = 1000;
  nn::SequenceModelConfig model;
  std::string precision = "float32";  // of matrix products on a GPU, or bfloat16; parameters are float32
  train::SyntheticTraining training;
  std::int64_t evaluate_every = 100;  // steps
  std::optional<double> enough;       // training ends at this accuracy on the first test
};

// Returns what a checkpoint must agree on to be continued.
nlohmann::json description(const SyntheticRun& run);

// Trains and measures, from the folder's checkpoint if there is one. Returns the entry of results.json's "runs", or
// nothing where it was stopped, with a checkpoint saved. A non-finite loss, gradient or logit ends the run: its entry
// has "diverged", the step, and no accuracies. metrics.jsonl gets a line per step {"event": "step", step, loss, lr,
// grad_norm, sequences_per_second, seconds} and one per evaluation {"event": "evaluation", step, accuracy, seconds},
// where seconds is the time spent in steps.
std::optional<nlohmann::ordered_json> execute(const SyntheticRun& run, const std::filesystem::path& folder,
                                              const RunContext& context);

}  // namespace efla::experiments
