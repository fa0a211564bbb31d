// Trains a sequence model on a synthetic task step by step, and measures it.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "efla/base/threads.h"
#include "efla/data/synthetic/task.h"
#include "efla/train/batch_gradient.h"
#include "efla/train/flat_parameters.h"
#include "efla/train/schedule.h"
#include "efla/train/stop.h"

namespace efla::train {

// What training needs of a model of sequences.
struct SequenceClassifier {
  NamedParameters parameters;  // float32 leaves, in a fixed order

  // nn::SequenceModel::logits. Called by several threads at once.
  std::function<torch::Tensor(const torch::Tensor& ids, const torch::Tensor& places)> logits;
};

struct SyntheticTraining {
  std::int64_t steps = 1000;
  std::int64_t batch_size = 64;
  // Of a training set that epochs go through, each in an order of its own; 0: every step draws examples of its own.
  std::int64_t examples = 0;
  double lr = 1e-3;
  double lr_floor = 0.0;  // where a cosine ends
  double weight_decay = 0.01;
  Schedule schedule = Schedule::cosine;  // of steps, or of epochs where there are any
  double warmup = 0.0;                   // part of them over which the rate rises
  double clip = 1.0;                     // largest gradient norm; 0 does not clip
  std::uint64_t seed = 1;                // of parameters and examples

  std::int64_t steps_per_epoch() const;  // 0 without epochs
};

// Throws Error, naming the option, where a value is out of range.
void validate(const SyntheticTraining& training);

nlohmann::json to_json(const SyntheticTraining& training);

struct SyntheticStep {
  std::int64_t step = 0;  // updates made so far, this one included
  double loss = 0.0;      // mean cross-entropy of the batch's targets before the update
  double lr = 0.0;
  double grad_norm = 0.0;  // before clipping
  bool updated = false;    // false: loss or gradient is not finite, and the parameters stay as they were
};

// AdamW on the mean cross-entropy of each batch's targets. The same bits for any number of threads, and memory for a
// bounded number of tokens at a time (at least one sequence) besides a gradient for each such part of the batch.
class SyntheticTrainer {
 public:
  // model, task and pool outlive the trainer.
  SyntheticTrainer(const SequenceClassifier& model, const data::synthetic::Task& task,
                   const SyntheticTraining& training, ThreadPool& pool);

  std::int64_t steps_done() const { return step_; }
  SyntheticStep step();

  // As Trainer's: a checkpoint from which the next step has the same bits.
  void save(const std::filesystem::path& path, const nlohmann::json& run) const;
  void restore(const std::filesystem::path& path, const nlohmann::json& run);

 private:
  std::vector<std::int64_t> batch_indices();
  double learning_rate_now() const;

  const SequenceClassifier& model_;
  const data::synthetic::Task& task_;
  SyntheticTraining training_;
  ThreadPool& pool_;
  FlatParameters parameters_;
  BatchGradient gradient_;
  FlatAdamW optimizer_;
  std::int64_t step_ = 0;
};

// The accuracy, in [0, 1], on the first examples of the test split, as task.accuracy says; NaN where a logit is not
// finite, whatever is the largest. Throws Stopped.
double evaluate(const SequenceClassifier& model, const data::synthetic::Task& task, std::uint64_t seed,
                std::int64_t examples, std::int64_t batch_size, ThreadPool& pool, const StopFunction& stop = {});

}  // namespace efla::train
