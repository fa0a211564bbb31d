// What is trained: a task brings the data of each step, copies of its model, the loss, and its own evaluation.
// Everything else (gradients, optimiser, checkpoints, the run's course) is Trainer's and train_in_folder's.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "efla/base/stop.h"
#include "efla/io/fields.h"
#include "efla/train/distributed/data_parallel.h"
#include "efla/train/distributed/process_group.h"
#include "efla/train/learning_rate.h"

namespace efla::train {

// A loss, a gradient or an output of the model is not finite; the message says which.
class NonFinite : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One part of a step's data, computed by one thread.
struct Part {
  std::vector<torch::Tensor> inputs;  // what Task::loss takes
  std::int64_t targets = 0;           // number of targets that losses are summed over
  std::int64_t examples = 0;          // images, sequences or tokens
  double weight = 0.0;                // factor of PartLoss::loss in the sum of the step's losses
};

struct PartLoss {
  // The losses of the part's targets, summed and divided by Task::normaliser(): a scalar with its graph.
  torch::Tensor objective;
  torch::Tensor loss;     // a scalar in proportion to the sum of the losses
  torch::Tensor correct;  // int64, number of targets that the model found; undefined if the task does not count them
};

// An update of the parameters.
struct StepResult {
  std::int64_t step = 0;           // updates made so far, this one included
  std::int64_t step_examples = 0;  // of all ranks
  std::int64_t examples = 0;       // since the run began
  double loss = 0.0;               // mean over the targets of all ranks, before the update
  double accuracy = 0.0;           // the share of targets found, for tasks that count them
  double lr = 0.0;
  double grad_norm = 0.0;  // before clipping
  bool updated = false;    // false: loss or gradient is not finite, and the parameters stay as they were
  bool stop = false;       // a rank was asked to stop
};

class Task {
 public:
  virtual ~Task() = default;

  // Makes one more copy of the model and returns its parameters: float32 leaves, in a fixed order.
  virtual nn::NamedParameters add_copy() = 0;

  virtual std::int64_t steps() const = 0;  // of the whole run
  virtual LearningRate learning_rate() const = 0;
  // Returns the step whose learning rate is that of `step`, for tasks whose rate changes by epochs.
  virtual std::int64_t schedule_step(std::int64_t step) const { return step; }

  // What the examples are called in metrics: "images_per_second".
  virtual std::string unit() const = 0;
  // Returns whether StepResult::accuracy means something.
  virtual bool counts_correct() const { return false; }
  // Returns the fields that say how far a run is, for metrics.jsonl: its epoch, or its tokens.
  virtual nlohmann::ordered_json progress(std::int64_t /*step*/, std::int64_t /*examples*/) const {
    return nlohmann::ordered_json::object();
  }

  // Chooses the data of a step (the first is 0) on this rank and returns the number of its parts. Steps come in order
  // unless seek() is called.
  virtual std::int64_t draw(std::int64_t step) = 0;
  // Returns the number by which objectives are divided: the number of the step's targets on all ranks, or an estimate
  // if this number is known only after the step.
  virtual double normaliser() const = 0;
  // Returns a part of the step that was drawn. Called by several threads, as is loss.
  virtual Part part(std::int64_t i) = 0;
  // Computes the loss of a part that has targets from its inputs, with one copy of the model.
  virtual PartLoss loss(const std::vector<torch::Tensor>& inputs, int copy) = 0;
  // Returns whether loss does equal work for inputs of equal shapes and never waits for a GPU. Then a CUDA graph of the
  // work can be replayed.
  virtual bool repeats() const { return false; }

  // The place in the data, for tasks that do not know it from the number of the step. seek throws if the fields are not
  // a position.
  virtual nlohmann::json position() const { return nlohmann::json::object(); }
  virtual void seek(const io::Fields& /*position*/) {}

  // Measures the model and returns the fields of the evaluation. Called by all ranks. Throws Stopped where a rank's
  // stop says so, and NonFinite.
  virtual nlohmann::ordered_json evaluate(const DataParallel& model, ProcessGroup& group, const StopFunction& stop) = 0;
  // Returns whether training ends early after this evaluation.
  virtual bool enough(const nlohmann::ordered_json& /*evaluation*/) const { return false; }
  // Returns a text that the model continues, for tasks that have samples.
  virtual std::string sample() { return {}; }

  // Write model.safetensors and other files of the model into a checkpoint's folder, and read the parameters back.
  virtual void write_model(const std::filesystem::path& folder, const FlatParameters& parameters) const;
  void read_model(const std::filesystem::path& folder, const FlatParameters& parameters);
};

}  // namespace efla::train
