// Training a model of sequences on a synthetic task.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <vector>

#include "efla/base/threads.h"
#include "efla/data/synthetic/task.h"
#include "efla/torch/graph_replay.h"
#include "efla/train/task.h"
#include "efla/train/trainer.h"

namespace efla::train {

// What training needs of a model of sequences.
struct SequenceClassifier {
  nn::NamedParameters parameters;  // float32 leaves, in a fixed order

  // nn::SequenceModel::logits. Called by several threads at once.
  std::function<torch::Tensor(const torch::Tensor& ids, const torch::Tensor& places)> logits;
};

struct SyntheticTraining {
  std::int64_t steps = 1000;
  std::int64_t batch_size = 64;
  // Size of a training set that each epoch visits in an order of its own; 0: every step draws new examples.
  std::int64_t examples = 0;
  double lr = 1e-3;
  double lr_floor = 0.0;  // where a cosine ends
  double weight_decay = 0.01;
  Schedule schedule = Schedule::cosine;  // of steps, or of epochs where there are any
  double warmup = 0.0;                   // the fraction of these over which the rate rises
  double clip = 1.0;                     // largest gradient norm; 0 does not clip
  std::uint64_t seed = 1;                // of parameters and examples

  std::int64_t steps_per_epoch() const;  // 0 without epochs
};

// Throws Error, naming the option, where a value is out of range.
void validate(const SyntheticTraining& training);

nlohmann::json to_json(const SyntheticTraining& training);

// The tests during training.
struct SyntheticTest {
  const data::synthetic::Task* task = nullptr;  // outlives the training
  std::int64_t examples = 0;
  std::optional<double> enough;  // training ends at this accuracy
};

// The mean cross-entropy of each batch's targets. Parts of a batch have a bounded number of tokens (at least one
// sequence). An evaluation is the accuracy on a test.
class SequenceTask : public Task {
 public:
  using MakeModel = std::function<SequenceClassifier()>;

  // The tasks must outlive this object; `make` makes a copy of the model. Throws Error for options out of range.
  SequenceTask(MakeModel make, const data::synthetic::Task& task, const SyntheticTraining& training,
               const SyntheticTest& test = {});

  // The first copy.
  const SequenceClassifier& model() const { return copies_.front(); }

  nn::NamedParameters add_copy() override;
  std::int64_t steps() const override { return training_.steps; }
  LearningRate learning_rate() const override;
  std::int64_t schedule_step(std::int64_t step) const override;
  std::string unit() const override { return "sequences"; }
  std::int64_t draw(std::int64_t step) override;
  double normaliser() const override { return targets_; }
  Part part(std::int64_t i) override;
  PartLoss loss(const std::vector<torch::Tensor>& inputs, int copy) override;
  bool repeats() const override { return true; }
  nlohmann::ordered_json evaluate(const DataParallel& model, ProcessGroup& group, const StopFunction& stop) override;
  bool enough(const nlohmann::ordered_json& evaluation) const override;

 private:
  std::vector<std::int64_t> batch_indices(std::int64_t step);

  MakeModel make_;
  const data::synthetic::Task& task_;
  SyntheticTraining training_;
  SyntheticTest test_;
  std::vector<SequenceClassifier> copies_;
  libtorch::GraphReplay replay_;  // of tests
  std::vector<std::uint32_t> order_;
  std::int64_t order_epoch_ = -1;                                 // of order_
  std::vector<data::synthetic::Example> batch_;                   // of the step that was drawn, by rising length
  std::vector<std::span<const data::synthetic::Example>> parts_;  // of batch_
  double targets_ = 0.0;                                          // of batch_
};

// Returns what the optimiser takes from the options.
UpdateOptions update_options(const SyntheticTraining& training);

// Returns the accuracy, in [0, 1], on the first examples of the test split, as task.accuracy says; NaN where a logit is
// not finite. On a GPU `replay` keeps what is launched for the next call with this model and task. Throws Stopped.
double evaluate(const SequenceClassifier& model, const data::synthetic::Task& task, std::uint64_t seed,
                std::int64_t examples, std::int64_t batch_size, ThreadPool& pool, libtorch::GraphReplay& replay,
                const StopFunction& stop = {});

}  // namespace efla::train
