// Trains a classifier step by step: the update of one batch, and checkpoints from which the next step has the same
// bits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "efla/base/threads.h"
#include "efla/train/batch_gradient.h"
#include "efla/train/classifier.h"
#include "efla/train/flat_parameters.h"
#include "efla/train/options.h"

namespace efla::train {

struct StepResult {
  std::int64_t step = 0;   // updates made so far, this one included
  std::int64_t epoch = 0;  // the epoch that the batch belongs to, from 1
  std::int64_t images = 0;
  double loss = 0.0;      // mean cross-entropy of the batch before the update
  double accuracy = 0.0;  // of the batch before the update
  double lr = 0.0;
  double grad_norm = 0.0;  // before clipping
  bool updated = false;    // false: loss or gradient is not finite, and the parameters stay as they were
};

// AdamW on the mean cross-entropy of batches in the order of epoch_order, the last batch of an epoch being smaller
// where the batch size does not divide the images. Everything but time is the same for any number of threads.
class Trainer {
 public:
  // classifier, images and pool outlive the trainer. Throws Error for options out of range and for an empty set.
  Trainer(const Classifier& classifier, const data::ImageSet& images, const TrainOptions& options, ThreadPool& pool);

  std::int64_t steps_per_epoch() const { return steps_per_epoch_; }
  std::int64_t total_steps() const { return options_.epochs * steps_per_epoch_; }
  std::int64_t steps_done() const { return step_; }

  StepResult step();

  // One safetensors file: model.NAME, adamw.exp_avg.NAME and adamw.exp_avg_sq.NAME for each parameter; metadata format,
  // step (which with the seed in run gives the place in the data) and run, the JSON that says what is trained. Written
  // to a temporary name, then renamed.
  void save(const std::filesystem::path& path, const nlohmann::json& run) const;

  // The reverse. Throws Error, naming the field with both values, where the checkpoint is of another run, and IoError
  // where it is no checkpoint.
  void restore(const std::filesystem::path& path, const nlohmann::json& run);

 private:
  const Classifier& classifier_;
  const data::ImageSet& images_;
  TrainOptions options_;
  ThreadPool& pool_;
  FlatParameters parameters_;
  BatchGradient gradient_;
  FlatAdamW optimizer_;
  std::int64_t steps_per_epoch_, step_ = 0;
  std::int64_t order_epoch_ = -1;     // whose order order_ is, from 0
  std::vector<std::uint32_t> order_;  // [images]
};

}  // namespace efla::train
