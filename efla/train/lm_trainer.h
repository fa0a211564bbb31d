// Trains a language model step by step, on one process or several: the update of one global batch, and checkpoints from
// which the next step has the same bits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "efla/data/packed_batches.h"
#include "efla/train/evaluate.h"
#include "efla/train/flat_parameters.h"
#include "efla/train/gradient_sum.h"
#include "efla/train/lm_options.h"
#include "efla/train/ranks.h"
#include "efla/train/replicas.h"

namespace efla::train {

struct LmStepResult {
  std::int64_t step = 0;         // updates made so far, this one included
  std::int64_t step_tokens = 0;  // of all ranks
  std::int64_t tokens = 0;       // since the run began
  double loss = 0.0;             // mean cross-entropy in nats of the targets of all ranks, before the update
  double lr = 0.0;
  double grad_norm = 0.0;  // before clipping
  bool updated = false;    // false: loss or gradient is not finite, and the parameters stay as they were
  bool stop = false;       // a rank was asked to stop
};

// AdamW on the mean cross-entropy of global batches. Each is cut into micro-batches, of which every rank computes its
// share, and owns the moments of a share of the parameters. Loss and parameters have the same bits for any number of
// replicas and threads; for other numbers of ranks they differ by rounding.
class LmTrainer {
 public:
  // All outlive the trainer. Throws Error for options that do not fit the data or the number of ranks.
  LmTrainer(Replicas& replicas, const io::TokenFolder& corpus, const LmTrainOptions& options, Ranks& ranks);

  std::int64_t steps_done() const { return step_; }
  std::int64_t tokens_done() const { return tokens_; }
  std::int64_t windows() const { return batches_.windows(); }

  // stop is asked at the step's end.
  LmStepResult step(const StopFunction& stop = {});

  // Writes what goes on from here into an existing folder: optimizer.safetensors (adamw.exp_avg.NAME and
  // adamw.exp_avg_sq.NAME of every parameter) and trainer.json {"format", "step", "tokens", "position", "config"}. To
  // be called by all ranks; rank 0 alone writes.
  void save(const std::filesystem::path& folder, const nlohmann::json& config);

  // The reverse, by all ranks; the parameters themselves are read by whoever knows the model. Throws Error, naming the
  // field, where the checkpoint is of another configuration, and IoError where it is no checkpoint.
  void restore(const std::filesystem::path& folder, const nlohmann::json& config);

 private:
  struct Sums;

  Sums accumulate();
  void send(const Range& bucket);
  void update(double scale, double lr);
  // A tensor of a number a parameter, of which each rank has what it owns: whole on rank 0, undefined on the others.
  torch::Tensor collect(const torch::Tensor& owned);

  Replicas& replicas_;
  LmTrainOptions options_;
  Ranks& ranks_;
  std::vector<std::int64_t> boundaries_;  // [ranks + 1] of what each rank owns
  std::vector<Range> buckets_;
  std::vector<std::function<void()>> pending_;  // sums of buckets on their way
  GradientSum sum_;
  FlatAdamW adamw_;
  data::PackedBatches batches_;
  std::int64_t micro_batches_;  // of this rank in a step
  std::int64_t step_ = 0, tokens_ = 0;
};

}  // namespace efla::train
