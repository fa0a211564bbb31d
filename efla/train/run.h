// A training run in a folder of its own, which continues to the same bits after any interruption:
//   metrics.jsonl               one line per step, evaluation and sample
//   tensorboard/                the same numbers for TensorBoard
//   checkpoints/step-NNNNNN/    checkpoint.h
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/io/checkpoint_folder.h"
#include "efla/train/metrics_log.h"
#include "efla/train/trainer.h"

namespace efla::train {

struct RunOptions {
  bool evaluate = true;               // after the last step; false: never
  std::int64_t evaluate_every = 0;    // steps between further evaluations; 0: none
  std::int64_t sample_every = 0;      // steps; 0: never
  std::int64_t checkpoint_every = 0;  // steps; 0: after the last only
  bool checkpoint_evaluated = false;  // also before each evaluation
  double checkpoint_pause = 0.0;      // seconds: no checkpoint before an evaluation if the last checkpoint is newer
  std::int64_t keep_checkpoints = 1;  // number of checkpoints that stay, the newest
};

struct RunEvents {
  StopFunction stop;  // asked at the end of each step and during evaluation
  std::function<void(const StepResult&, double examples_per_second)> step;
  std::function<void(std::int64_t step)> evaluating;
  std::function<void(std::int64_t step, const nlohmann::ordered_json& evaluation)> evaluated;
  std::function<void(std::int64_t step, const std::string& text)> sampled;
};

// The arguments that stay the same over a run.
struct Run {
  std::filesystem::path folder;  // exists
  nlohmann::json config;         // what is trained: a checkpoint must agree on it to be resumed
  RunOptions options;
};

// What a command keeps about a run, in the run's folder.
inline constexpr const char* kRunFile = "run.json";

enum class RunEnd { finished, stopped };

// Trains for all steps, or until an evaluation is enough for the task, beginning with the folder's latest checkpoint if
// it has one. Called by all ranks, of which rank 0 alone writes. metrics.jsonl gets lines {"event": "step", step,
// [progress], loss, [accuracy], lr, grad_norm, UNIT_per_second, seconds}, {"event": "evaluation", step, [progress],
// [evaluation], seconds} and {"event": "sample", step, [progress], text, seconds}; only UNIT_per_second and seconds
// (the time spent in steps) differ between two runs. A stop saves a checkpoint and returns. Throws NonFinite if a loss,
// a gradient or a result of an evaluation is not finite, and std::runtime_error if a checkpoint cannot be written. The
// message names the last good checkpoint, or the checkpoint of the model that was evaluated.
RunEnd train_in_folder(const Run& run, Task& task, DataParallel& model, const UpdateOptions& update,
                       ProcessGroup& group, const RunEvents& events);

}  // namespace efla::train
