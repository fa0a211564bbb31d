// Any language model, with LibTorch's tensors for each text.
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "efla/engine/model_steps.h"
#include "efla/nn/models/language_model_state.h"
#include "efla/torch/one_thread.h"

namespace efla::engine {
namespace {

using nn::LanguageModelState;
using torch::Tensor;

constexpr std::int64_t kPageTokens = 256;   // the least room of a cache of keys and values
constexpr std::int64_t kReadTokens = 2048;  // of a prompt per call of the layers

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// A decoder takes several texts in one call: their states are then joined to one, until another text is decoded with
// them. Without a decoder the texts are decoded one by one.
class TorchModel final : public StepModel {
 public:
  TorchModel(std::shared_ptr<const nn::LanguageModel> model, std::shared_ptr<const nn::GpuDecoder> decoder)
      : model_(std::move(model)), decoder_(std::move(decoder)), empty_(model_->initial_state(1)) {}

  const nn::LanguageModelConfig& config() const override { return model_->config(); }
  Capabilities capabilities() const override {
    return {.in_process = device().is_cpu(), .draws = decoder_ != nullptr, .cut_tokens = kReadTokens};
  }
  std::size_t weight_bytes() const override { return bytes_of(*model_); }
  // A cache of keys and values at least doubles when it grows.
  TextMemory text_memory() const override {
    const auto constant = layout(0).constant_bytes();
    return {constant, 2 * (layout(kPageTokens).constant_bytes() - constant), kPageTokens};
  }
  StateLayout layout(std::int64_t tokens) const override {
    std::vector<nn::StatePart> parts;
    std::size_t offset = 0;
    for (const auto& [name, tensor] : empty_.tensors()) {
      auto shape = tensor.sizes().vec();
      if (name.ends_with("keys") || name.ends_with("values")) shape[2] = tokens;
      const auto floats = static_cast<std::size_t>(numel_of(shape));
      parts.push_back({name, shape, offset, floats});
      offset += floats;
    }
    return {.parts = std::move(parts)};
  }

  void make_slots(std::int64_t slots, std::int64_t /*pages*/) override {
    for (std::int64_t slot = 0; slot < slots; ++slot) states_.push_back(model_->initial_state(1));
    row_of_.assign(static_cast<std::size_t>(slots), -1);
  }
  void clear(std::int64_t slot) override {
    leave_row(slot);
    state_of(slot) = model_->initial_state(1);
  }
  void set(std::int64_t slot, const nn::TextState& given) override {
    clear(slot);
    const auto staged = torch::tensor(at::ArrayRef<float>(*given.constant));
    const auto parts = layout(given.tokens).parts;
    auto part = parts.begin();
    state_of(slot).read(
        [&](const std::string& /*name*/, at::IntArrayRef sizes) {
          const auto& from = *part++;
          return staged.narrow(0, static_cast<std::int64_t>(from.offset), static_cast<std::int64_t>(from.floats))
              .view(sizes)
              .clone();
        },
        given.tokens);
  }
  void copy(std::int64_t from, std::int64_t to, std::int64_t /*tokens*/) override {
    leave_row(to);
    state_of(to) = current(from);
  }
  void drop(std::int64_t slot) override {
    leave_row(slot);
    state_of(slot) = {};
    if (std::ranges::all_of(slot_of_, [](std::int64_t other) { return other < 0; })) joined_ = {};
  }
  nn::TextState state(std::int64_t slot, std::int64_t tokens) override {
    std::vector<float> all;
    for (const auto& [name, tensor] : current(slot).tensors()) {
      const float* floats = tensor.data_ptr<float>();
      all.insert(all.end(), floats, floats + tensor.numel());
    }
    return {tokens, std::make_shared<std::vector<float>>(std::move(all))};
  }

 private:
  LanguageModelState& state_of(std::int64_t slot) { return states_[static_cast<std::size_t>(slot)]; }

  torch::Device device() const override { return model_->head().device(); }
  Tensor head(const Tensor& hidden) const override {
    return decoder_ ? decoder_->logits(hidden) : model_->logits_of(hidden);
  }

  std::int64_t row_of(std::int64_t slot) const override { return row_of_[static_cast<std::size_t>(slot)]; }

  // Returns an independent state of a text.
  LanguageModelState current(std::int64_t slot) {
    const auto row = row_of(slot);
    auto& own = state_of(slot);
    return row < 0 || !decoder_ ? own.clone() : joined_.row(row, own.tokens);
  }

  void leave_row(std::int64_t slot) {
    auto& row = row_of_[static_cast<std::size_t>(slot)];
    if (row >= 0) slot_of_[static_cast<std::size_t>(row)] = -1;
    row = -1;
  }
  // Takes a text out of the step, with its state.
  void leave(std::int64_t slot) {
    if (decoder_) state_of(slot) = current(slot);
    leave_row(slot);
  }
  void leave_rows(std::span<const nn::TextRun> staying) override {
    for (const auto slot : std::vector(slot_of_)) {
      const auto is_own = [&](const nn::TextRun& run) { return run.slot == slot; };
      if (slot >= 0 && std::ranges::none_of(staying, is_own)) leave(slot);
    }
  }

  // Keeps the rows as long as more than half of them have a text, because each joined state has a CUDA graph.
  std::int64_t take_rows(std::span<const nn::TextRun> runs) override {
    const bool same = decoder_ && 2 * runs.size() > slot_of_.size() &&
                      std::ranges::all_of(runs, [&](const nn::TextRun& run) { return row_of(run.slot) >= 0; });
    if (same) return std::ssize(slot_of_);
    for (const auto slot : std::vector(slot_of_)) {
      if (slot >= 0) leave(slot);
    }
    slot_of_.clear();
    std::vector<const LanguageModelState*> states;
    for (const auto& run : runs) {
      row_of_[static_cast<std::size_t>(run.slot)] = std::ssize(slot_of_);
      slot_of_.push_back(run.slot);
      states.push_back(&state_of(run.slot));
    }
    if (decoder_) join(states);
    return std::ssize(slot_of_);
  }

  // Joins the states of the rows, whose slots keep only the numbers of their tokens.
  void join(const std::vector<const LanguageModelState*>& states) {
    joined_ = LanguageModelState::joined(states);
    for (const auto slot : slot_of_) state_of(slot) = {1, state_of(slot).tokens, {}};
  }

  nn::StepOutput step(const Tensor& ids) override {
    for (const auto slot : slot_of_) {
      if (decoder_ && slot >= 0) ++state_of(slot).tokens;  // its tensors are in the joined state
    }
    if (decoder_) return decoder_->step_drawn(ids, joined_);
    libtorch::compute_on_this_thread_only();
    std::vector<Tensor> logits;
    for (std::int64_t row = 0; row < std::ssize(slot_of_); ++row) {
      logits.push_back(model_->step(ids.narrow(0, row, 1), state_of(slot_of_[static_cast<std::size_t>(row)])));
    }
    return {torch::cat(logits), {}};
  }

  Tensor read(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs) override {
    if (device().is_cpu()) libtorch::compute_on_this_thread_only();
    std::vector<Tensor> hidden;
    std::size_t begin = 0;
    for (const auto& run : runs) {
      const auto count = static_cast<std::size_t>(run.tokens);
      const auto own = ids.subspan(begin, count);
      const auto prompt = on_device({own.begin(), own.end()}).unsqueeze(0);
      auto& state = state_of(run.slot);
      hidden.push_back((decoder_ ? decoder_->advance(prompt, state) : model_->advance(prompt, state))[0]);
      begin += count;
    }
    return torch::cat(hidden);
  }

  std::shared_ptr<const nn::LanguageModel> model_;
  std::shared_ptr<const nn::GpuDecoder> decoder_;
  LanguageModelState empty_;
  std::vector<LanguageModelState>
      states_;                 // of the slots; out of date, but for `tokens`, where a text has a row of joined_
  LanguageModelState joined_;  // of the rows, with a decoder
  std::vector<std::int64_t> row_of_, slot_of_;  // of a slot, and of a row; −1: none
};

}  // namespace

std::unique_ptr<EngineModel> make_torch_model(std::shared_ptr<const nn::LanguageModel> model,
                                              std::shared_ptr<const nn::GpuDecoder> decoder) {
  return std::make_unique<TorchModel>(std::move(model), std::move(decoder));
}

}  // namespace efla::engine
