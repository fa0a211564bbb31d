// One training run of a synthetic study in a folder of its own: what was interrupted goes on to the same bits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "efla/nn/models/sequence_model.h"
#include "efla/train/tasks/sequence_task.h"

namespace efla::train {

struct SyntheticRun {
  std::string name;     // "stack-kda-lr0.001-wd0.01-seed42": of its folder
  std::string task;     // of the study's table
  std::string setting;  // of the task: what differs from its first one, "" for that
  data::synthetic::Task training_task;
  std::vector<data::synthetic::Task> test_tasks;  // the first is measured while training too
  std::int64_t test_examples = 1000;
  nn::SequenceModelConfig model;
  SyntheticTraining training;
  std::int64_t evaluate_every = 100;  // steps
  std::optional<double> enough;       // training ends at this accuracy on the first test
};

// What a checkpoint must agree on to be continued.
nlohmann::json description(const SyntheticRun& run);

struct SyntheticEvents {
  StopFunction stop;  // asked at the end of each step and during evaluation
  std::function<void(const SyntheticRun&, const StepResult&)> step;
};

// Trains and measures, starting from the folder's checkpoint where there is one, and returns the entry of
// results.json's "runs", which it keeps in the folder's result.json; one that is there already is returned as it is.
// Nothing where it was stopped, with a checkpoint saved. A loss, gradient or logit that is not finite ends the run: its
// entry has "diverged", the step, and no accuracies. run.h says
// what else the folder gets; an evaluation has the accuracy on the first test.
std::optional<nlohmann::ordered_json> run_in_folder(const std::filesystem::path& folder, const SyntheticRun& run,
                                                    ThreadPool& pool, const SyntheticEvents& events);

}  // namespace efla::train
