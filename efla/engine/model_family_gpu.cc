// Models of families on a GPU.
#include <torch/types.h>

#include <algorithm>
#include <utility>

#include "efla/engine/model_steps.h"
#include "efla/nn/families/gpu_family_model.h"

namespace efla::engine {
namespace {

using torch::Tensor;

// The states of texts stay in their slots, whose numbers are an input of a decode step. A step has as many rows as the
// next power of two of its texts, because each number of rows has a CUDA graph of its own.
class GpuFamilyEngineModel final : public StepModel {
 public:
  explicit GpuFamilyEngineModel(std::shared_ptr<nn::GpuFamilyModel> model)
      : model_(std::move(model)), config_(engine_config(model_->config())) {}

  const nn::LanguageModelConfig& config() const override { return config_; }
  Capabilities capabilities() const override { return {.in_process = false, .draws = true}; }
  std::size_t weight_bytes() const override { return model_->weight_bytes(); }
  TextMemory text_memory() const override {
    return {.constant = model_->constant_bytes(), .page = model_->page_bytes(), .page_tokens = kAttentionBlock};
  }
  StateLayout layout(std::int64_t tokens) const override {
    return {model_->state_parts(), text_memory().pages(tokens), model_->outside_page_bytes(), model_->kv_cache_type()};
  }

  void make_slots(std::int64_t slots, std::int64_t /*pages*/) override {
    model_->make_slots(slots);
    row_of_.assign(static_cast<std::size_t>(slots), -1);
    tokens_.assign(static_cast<std::size_t>(slots), 0);
  }
  void clear(std::int64_t slot) override {
    drop(slot);
    model_->clear(slot);
    tokens_of(slot) = 0;
  }
  void set(std::int64_t slot, const nn::TextState& state) override {
    drop(slot);
    model_->set(slot, state);
    tokens_of(slot) = state.tokens;
  }
  void copy(std::int64_t from, std::int64_t to, std::int64_t tokens) override {
    drop(to);
    model_->copy(from, to, tokens);
    tokens_of(to) = tokens;
  }
  void drop(std::int64_t slot) override {
    leave_row(slot);
    model_->drop(slot);
  }
  nn::TextState state(std::int64_t slot, std::int64_t tokens) override { return model_->state(slot, tokens); }

 private:
  torch::Device device() const override { return model_->device(); }
  std::int64_t& tokens_of(std::int64_t slot) { return tokens_[static_cast<std::size_t>(slot)]; }
  std::int64_t row_of(std::int64_t slot) const override { return row_of_[static_cast<std::size_t>(slot)]; }

  void leave_row(std::int64_t slot) {
    auto& row = row_of_[static_cast<std::size_t>(slot)];
    if (row >= 0) slot_of_[static_cast<std::size_t>(row)] = -1;
    row = -1;
  }
  void leave_rows(std::span<const nn::TextRun> staying) override {
    for (const auto slot : std::vector(slot_of_)) {
      const auto is_own = [&](const nn::TextRun& run) { return run.slot == slot; };
      if (slot >= 0 && std::ranges::none_of(staying, is_own)) leave_row(slot);
    }
  }
  std::int64_t take_rows(std::span<const nn::TextRun> runs) override {
    std::int64_t count = 1;
    while (std::cmp_less(count, runs.size())) count = std::min<std::int64_t>(2 * count, std::ssize(row_of_));
    for (const auto slot : std::vector(slot_of_)) {
      if (slot >= 0) leave_row(slot);
    }
    slot_of_.assign(static_cast<std::size_t>(count), -1);
    for (std::size_t row = 0; row < runs.size(); ++row) {
      slot_of_[row] = runs[row].slot;
      row_of_[static_cast<std::size_t>(runs[row].slot)] = static_cast<std::int64_t>(row);
    }
    return count;
  }

  nn::StepOutput step(const Tensor& ids) override {
    std::vector<nn::GpuFamilyModel::Entry> entries;
    for (const auto slot : slot_of_) {
      entries.push_back({slot, slot < 0 ? 0 : tokens_of(slot)++});
    }
    return model_->step(ids, entries);
  }
  Tensor head(const Tensor& hidden) const override { return model_->logits(hidden); }

  Tensor read(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs) override {
    for (const auto& run : runs) tokens_of(run.slot) = run.begin + run.tokens;
    return model_->read(on_device({ids.begin(), ids.end()}), runs);
  }

  const std::shared_ptr<nn::GpuFamilyModel> model_;
  nn::LanguageModelConfig config_;
  std::vector<std::int64_t> tokens_;            // of the texts in the slots
  std::vector<std::int64_t> row_of_, slot_of_;  // of a slot, and of a row; −1: none
};

}  // namespace

std::unique_ptr<EngineModel> make_family_model(std::shared_ptr<nn::GpuFamilyModel> model) {
  return std::make_unique<GpuFamilyEngineModel>(std::move(model));
}

}  // namespace efla::engine
