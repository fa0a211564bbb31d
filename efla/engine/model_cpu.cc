#include <algorithm>
#include <optional>

#include "efla/base/error.h"
#include "efla/base/memory.h"
#include "efla/engine/model.h"
#include "efla/nn/inference/rows.h"

namespace efla::engine {
namespace {

class CpuModel final : public EngineModel {
 public:
  CpuModel(const nn::LanguageModel& model, nn::WeightType weights) : model_(model, weights), weights_(weights) {}

  const nn::LanguageModelConfig& config() const override { return model_.config(); }
  // Drafts save time as long as most of a step is reading the weights, once for all rows.
  Capabilities capabilities() const override {
    return {.most_drafted = nn::kMostDecoded - 1, .most_drafting = weights_ == nn::WeightType::float32 ? 4 : 1};
  }
  std::size_t weight_bytes() const override { return model_.weight_bytes(); }
  TextMemory text_memory() const override { return {.constant = model_.state_floats() * sizeof(float)}; }
  StateLayout layout(std::int64_t /*tokens*/) const override { return {.parts = model_.state_parts()}; }

  void make_slots(std::int64_t slots, std::int64_t /*pages*/) override {
    states_.emplace(slots, model_.state_floats());
  }
  void clear(std::int64_t slot) override { std::ranges::fill(states_->slot(slot), 0.0F); }
  void set(std::int64_t slot, const nn::TextState& state) override {
    std::ranges::copy(*state.constant, states_->slot(slot).begin());
  }
  void copy(std::int64_t from, std::int64_t to, std::int64_t /*tokens*/) override {
    std::ranges::copy(states_->slot(from), states_->slot(to).begin());
  }
  void drop(std::int64_t /*slot*/) override {}
  nn::TextState state(std::int64_t slot, std::int64_t tokens) override {
    const auto numbers = states_->slot(slot);
    return {tokens, std::make_shared<std::vector<float>>(numbers.begin(), numbers.end())};
  }

  void advance(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs, ThreadPool& pool) override {
    model_.advance(ids, runs, *states_, hidden_.rows(std::ssize(ids), config().hidden_size), pool, &drafts_);
  }
  View<float, 2> logits(std::span<const std::int64_t> rows, ThreadPool& pool) override {
    const std::int64_t width = config().hidden_size;
    const auto picked = picked_.rows(std::ssize(rows), width);
    const auto logits = logits_.rows(std::ssize(rows), config().vocab_size);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(hidden_.data() + rows[i] * width, width, picked.at(static_cast<std::int64_t>(i)));
    }
    model_.logits(picked, logits, pool);
    return logits;
  }
  void accept(std::size_t draft, std::int64_t tokens, ThreadPool& pool) override {
    model_.accept(drafts_[draft], tokens, *states_, pool);
  }

 private:
  nn::InferenceModel model_;
  nn::WeightType weights_;
  std::optional<nn::StatePool> states_;
  nn::RowBuffer hidden_, picked_, logits_;
  std::vector<nn::Draft> drafts_;
};

}  // namespace

double EngineModel::memory_bytes() const { return usable_memory_bytes(); }

std::vector<DrawnId> EngineModel::draw(std::span<const std::int64_t> /*rows*/, std::span<const Draw> /*draws*/,
                                       const SamplingOptions& /*options*/, std::int64_t /*drawable*/, bool /*ahead*/) {
  throw Error("engine", "draw", "one of a model that does not draw", "one that does");
}

std::vector<std::int32_t> EngineModel::draft(std::int64_t /*slot*/, std::int64_t /*tokens*/, std::int32_t /*id*/,
                                             std::int64_t /*most*/, ThreadPool& /*pool*/) {
  throw Error("engine", "draft_head", "a model without a head for drafts", "0");
}

void EngineModel::accept(std::size_t /*draft*/, std::int64_t /*tokens*/, ThreadPool& /*pool*/) {
  throw Error("engine", "draft", "one of a model that takes no drafts", "one that does");
}

std::unique_ptr<EngineModel> make_cpu_model(const nn::LanguageModel& model, nn::WeightType weights) {
  return std::make_unique<CpuModel>(model, weights);
}

}  // namespace efla::engine
