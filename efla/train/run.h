// A training run in a folder of its own: metrics.jsonl grows, checkpoint.safetensors is replaced, and what was
// interrupted goes on to the same bits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "efla/train/evaluate.h"
#include "efla/train/metrics.h"
#include "efla/train/trainer.h"

namespace efla::train {

inline constexpr const char* kCheckpointFile = "checkpoint.safetensors";

struct RunSpec {
  nlohmann::json model;  // the classifier's configuration
  nlohmann::json data;   // what the images are (describe)
  TrainOptions training;
  std::int64_t checkpoint_every = 0;  // steps; besides these, every epoch's end. Does not change the results
};

// {"model": …, "data": …, "training": …}: what a checkpoint must agree on to be continued.
nlohmann::json description(const RunSpec& spec);

// {"source": …, "train_images": n, "test_images": n, "digest": sixteen hexadecimal digits of all pixels and labels}.
nlohmann::json describe(const std::string& source, const data::ImageSet& train, const data::ImageSet& test);

struct RunEvents {
  StopFunction stop;  // asked after each step and during evaluation
  std::function<void(const StepResult&, double images_per_second, double seconds)> step;
  std::function<void(std::int64_t epoch)> evaluating;
  std::function<void(std::int64_t epoch, const Evaluation&)> evaluated;
};

enum class RunEnd { finished, stopped };

// Trains classifier (fresh, as its seed made it) for all epochs, evaluating on test after each, starting from the
// folder's checkpoint where there is one; the folder exists. A stop saves a checkpoint and returns. metrics.jsonl gets
// one line a step {"event": "step", step, epoch, loss, accuracy, lr, grad_norm, images_per_second, seconds} and one an
// evaluation {"event": "evaluation", step, epoch, loss, accuracy, seconds}; only images_per_second and seconds (the
// time spent in steps so far) differ between two runs. Throws std::runtime_error at a loss or gradient that is not
// finite, naming the step and the last good checkpoint, and what Trainer throws.
RunEnd train_in_folder(const std::filesystem::path& folder, const RunSpec& spec, const Classifier& classifier,
                       const data::ImageSet& train, const data::ImageSet& test, ThreadPool& pool,
                       const RunEvents& events);

}  // namespace efla::train
