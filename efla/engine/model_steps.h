// What the models share that compute with LibTorch's tensors.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <vector>

#include "efla/engine/model.h"
#include "efla/nn/inference/gpu_decoder.h"

namespace efla::engine {

// A decode step computes one token of each of some texts, which have rows in it. A row may be without a text; it
// computes numbers that nobody reads.
class StepModel : public EngineModel {
 public:
  double memory_bytes() const final;
  void advance(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs, ThreadPool& pool) final;
  View<float, 2> logits(std::span<const std::int64_t> rows, ThreadPool& pool) final;
  std::vector<DrawnId> draw(std::span<const std::int64_t> rows, std::span<const Draw> draws,
                            const SamplingOptions& options, std::int64_t drawable, bool ahead) final;

 protected:
  virtual torch::Device device() const = 0;
  // Returns the row of a text in the last step, or −1.
  virtual std::int64_t row_of(std::int64_t slot) const = 0;
  // Gives each of these texts a row, and returns the number of rows.
  virtual std::int64_t take_rows(std::span<const nn::TextRun> runs) = 0;
  // Takes the rows away from texts that are not among these.
  virtual void leave_rows(std::span<const nn::TextRun> staying) = 0;
  // Decodes a token of each row; ids [rows] on the device. The next call may overwrite the output, whose `likeliest` is
  // only for models that draw.
  virtual nn::StepOutput step(const torch::Tensor& ids) = 0;
  // Reads the runs of prompts. Returns the inputs of the head [tokens, D].
  virtual torch::Tensor read(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs) = 0;
  // Maps inputs of the head [N, D] to logits [N, vocab_size] float32.
  virtual torch::Tensor head(const torch::Tensor& hidden) const = 0;

  // Returns the bytes of a model's parameters.
  static std::size_t bytes_of(const nn::LanguageModel& model);
  // Returns numbers on the device, without waiting for the work that the device already has.
  torch::Tensor on_device(const std::vector<std::int64_t>& numbers) const;

 private:
  // A run of one decoded token, and its row in the step.
  struct Decoded {
    nn::TextRun run;
    std::int64_t row;
  };

  void decode(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs);
  void begin_step(const torch::Tensor& ids);
  torch::Tensor logits_of(std::span<const std::int64_t> rows) const;

  nn::StepOutput step_;           // of the last decode step, in the order of its rows
  std::vector<Decoded> decoded_;  // in the last advance
  bool begun_ = false;            // whether draw has begun the step
  torch::Tensor hidden_;          // [ids of the last advance's prompts, D]
  torch::Tensor logits_;          // [·, vocab_size], in the process's memory
};

}  // namespace efla::engine
