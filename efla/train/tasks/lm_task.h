// Training a language model on packed rows of tokens.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/data/packed_batches.h"
#include "efla/io/tokens/token_folder.h"
#include "efla/train/run.h"
#include "efla/train/task.h"
#include "efla/train/tasks/lm_evaluate.h"
#include "efla/train/tasks/lm_options.h"

namespace efla::train {

// Files and samples of the model that is trained, of its first copy.
struct LmFiles {
  // Writes config.json and model.safetensors to a folder.
  std::function<void(const std::filesystem::path& folder)> write;
  // Returns the text that continues sample_prompt.
  std::function<std::string()> sample;
};

struct LmData {
  const io::TokenFolder* train = nullptr;
  const io::TokenFolder* validation = nullptr;  // null: no evaluation
  TokenBytes token_bytes;                       // as evaluate takes it
};

// The mean cross-entropy of global batches. A batch is cut into micro-batches, of which every rank computes its own.
class LmTask : public Task {
 public:
  using MakeModel = std::function<LmReplica()>;

  // The corpora must outlive the task; `make` makes a copy of the model; `group` gives this process's rank and the
  // number of ranks. Throws Error for options that do not fit the data or the number of ranks.
  LmTask(MakeModel make, LmData data, const LmTrainOptions& options, const ProcessGroup& group,
         torch::Device device = torch::kCPU, LmFiles files = {});

  nn::NamedParameters add_copy() override;
  std::int64_t steps() const override { return options_.total_steps(); }
  LearningRate learning_rate() const override { return train::learning_rate(options_); }
  std::string unit() const override { return "tokens"; }
  nlohmann::ordered_json progress(std::int64_t step, std::int64_t examples) const override;
  std::int64_t draw(std::int64_t step) override;
  // Returns the tokens of a step, an estimate: the number of targets, which all weigh the same, is known only after the
  // step.
  double normaliser() const override { return static_cast<double>(options_.tokens_per_step); }
  Part part(std::int64_t i) override;
  PartLoss loss(const std::vector<torch::Tensor>& inputs, int copy) override;
  bool repeats() const override { return copies_.front().repeats; }
  nlohmann::json position() const override;
  void seek(const io::Fields& position) override;
  nlohmann::ordered_json evaluate(const DataParallel& model, ProcessGroup& group, const StopFunction& stop) override;
  std::string sample() override { return files_.sample(); }
  void write_model(const std::filesystem::path& folder, const FlatParameters& parameters) const override;

 private:
  MakeModel make_;
  LmData data_;
  LmTrainOptions options_;
  torch::Device device_;
  LmFiles files_;
  std::int64_t micro_batches_;  // of this rank in a step
  data::PackedBatches batches_;
  std::vector<LmReplica> copies_;
  std::vector<data::PackedBatch> drawn_;  // [micro_batches_]
};

// Returns what the optimiser and the run take from the options.
UpdateOptions update_options(const LmTrainOptions& options);
RunOptions run_options(const LmTrainOptions& options, bool has_validation);

}  // namespace efla::train
