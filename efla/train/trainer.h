// Trains a task's model step by step, on one process or several: the update of one batch, and checkpoints from which
// the next step has the same bits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "efla/torch/graph_replay.h"
#include "efla/train/distributed/data_parallel.h"
#include "efla/train/distributed/process_group.h"
#include "efla/train/flat_parameters.h"
#include "efla/train/gradient_sum.h"
#include "efla/train/task.h"

namespace efla::train {

struct UpdateOptions {
  AdamWSettings adamw;
  double clip = 1.0;  // largest gradient norm; 0 does not clip
};

// AdamW on the mean loss of each step's targets. A step is cut into parts, of which every rank computes its own, and
// every rank owns the moments of a range of the parameters. Loss and parameters have the same bits for any number of
// copies and threads; for other numbers of ranks they differ by rounding.
class Trainer {
 public:
  // All arguments but the options must outlive the trainer. The model's copies are those that the task made.
  Trainer(Task& task, DataParallel& model, const UpdateOptions& options, ProcessGroup& group);

  std::int64_t steps_done() const { return step_; }
  std::int64_t examples_done() const { return examples_; }

  // Computes a step's gradient and updates the parameters. stop is asked at the step's end.
  StepResult step(const StopFunction& stop = {});

  // Writes a checkpoint into an existing folder. Called by all ranks; rank 0 alone writes.
  void save(const std::filesystem::path& folder, const nlohmann::json& config);

  // Reads a checkpoint. Called by all ranks. Throws Error, naming the field, where the checkpoint is of another
  // configuration, and IoError where it is no checkpoint or of a step that the run does not have.
  void restore(const std::filesystem::path& folder, const nlohmann::json& config);

 private:
  struct Sums;

  // Computes the gradient and the sums of a step.
  Sums accumulate();
  // Computes the same on one GPU with CUDA graphs, for a task for which repeats() is true.
  Sums accumulate_by_replay(std::int64_t parts);
  void send(const Range& bucket);
  void update(double scale, double lr);
  // Gathers a flat buffer of which each rank has the range that it owns: whole on rank 0, undefined on the others.
  torch::Tensor collect(const torch::Tensor& owned);

  Task& task_;
  DataParallel& model_;
  UpdateOptions options_;
  ProcessGroup& group_;
  LearningRate rate_;
  std::vector<std::int64_t> boundaries_;  // [ranks + 1] of the ranges that the ranks own
  std::vector<Range> buckets_;
  std::vector<std::function<void()>> pending_;  // sums of buckets that other ranks still add to
  GradientSum sum_;
  libtorch::GraphReplay replay_;
  FlatAdamW adamw_;
  std::int64_t step_ = 0, examples_ = 0;
};

}  // namespace efla::train
