#include <algorithm>

#include "efla/engine/model.h"
#include "efla/nn/families/family_model.h"

namespace efla::engine {
namespace {

class FamilyEngineModel final : public EngineModel {
 public:
  FamilyEngineModel(std::shared_ptr<nn::FamilyModel> model, nn::WeightType weights)
      : model_(std::move(model)), weights_(weights), config_(engine_config(model_->config())) {}

  const nn::LanguageModelConfig& config() const override { return config_; }
  Capabilities capabilities() const override {
    return {.most_drafted = nn::kMostDecoded - 1, .most_drafting = weights_ == nn::WeightType::float32 ? 4 : 1};
  }
  std::size_t weight_bytes() const override { return model_->weight_bytes(); }
  TextMemory text_memory() const override {
    return {.constant = model_->constant_bytes(), .page = model_->page_bytes(), .page_tokens = kAttentionBlock};
  }
  StateLayout layout(std::int64_t tokens) const override {
    return {model_->state_parts(), text_memory().pages(tokens), model_->page_bytes(), model_->kv_cache_type()};
  }

  void make_slots(std::int64_t slots, std::int64_t /*pages*/) override { model_->make_slots(slots); }
  void clear(std::int64_t slot) override { model_->clear(slot); }
  void set(std::int64_t slot, const nn::TextState& state) override { model_->set(slot, state); }
  void copy(std::int64_t from, std::int64_t to, std::int64_t tokens) override { model_->copy(from, to, tokens); }
  void drop(std::int64_t slot) override { model_->drop(slot); }
  nn::TextState state(std::int64_t slot, std::int64_t tokens) override { return model_->state(slot, tokens); }

  void advance(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs, ThreadPool& pool) override {
    model_->advance(ids, runs, hidden_.rows(std::ssize(ids), config_.hidden_size), pool, &drafts_);
  }
  View<float, 2> logits(std::span<const std::int64_t> rows, ThreadPool& pool) override {
    const std::int64_t width = config_.hidden_size;
    const auto picked = picked_.rows(std::ssize(rows), width);
    const auto logits = logits_.rows(std::ssize(rows), config_.vocab_size);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(hidden_.data() + rows[i] * width, width, picked.at(static_cast<std::int64_t>(i)));
    }
    model_->logits(picked, logits, pool);
    return logits;
  }
  std::vector<std::int32_t> draft(std::int64_t slot, std::int64_t tokens, std::int32_t id, std::int64_t most,
                                  ThreadPool& pool) override {
    return model_->draft(slot, tokens, id, most, pool);
  }
  void accept(std::size_t draft, std::int64_t tokens, ThreadPool& pool) override {
    model_->accept(drafts_[draft], tokens, pool);
  }

 private:
  const std::shared_ptr<nn::FamilyModel> model_;
  nn::WeightType weights_;
  nn::LanguageModelConfig config_;  // what the engine reads of it
  nn::RowBuffer hidden_, picked_, logits_;
  std::vector<nn::Draft> drafts_;
};

}  // namespace

nn::LanguageModelConfig engine_config(const nn::FamilyConfig& config) {
  nn::LanguageModelConfig engine;
  engine.vocab_size = config.vocab_size;
  engine.hidden_size = config.hidden_size;
  engine.num_hidden_layers = config.layers();
  engine.bos_token_id = config.bos;
  engine.eos_token_id = config.eos;
  return engine;
}

std::unique_ptr<EngineModel> make_family_model(std::shared_ptr<nn::FamilyModel> model, nn::WeightType weights) {
  return std::make_unique<FamilyEngineModel>(std::move(model), weights);
}

}  // namespace efla::engine
