#include "efla/nn/families/family_model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "efla/rule/decay_activation.h"

namespace efla::nn {
namespace {

// Of the decay −rate · softplus(z + bias): the rate is exp(A_log), which is bounded as in decay_activation.h.
struct DecayRates {
  Vector rate, bias;
};

DecayRates decay_rates(Vector dt_bias, const Vector& a_log) {
  constexpr float kLargest = kLargestLogRate<float>;
  DecayRates rates{Vector(a_log.size()), std::move(dt_bias)};
  for (std::size_t h = 0; h < a_log.size(); ++h) {
    rates.rate[h] = std::exp(std::min(a_log[h], kLargest));
    rates.bias[h] += std::max(a_log[h] - kLargest, 0.0F);
  }
  return rates;
}

}  // namespace

FamilyModel::FamilyModel(const std::filesystem::path& folder, WeightType weights, KeyValueType kv_cache_type,
                         bool draft_head)
    : config_(load_family_config(folder)),
      mixers_(config_.mixer),
      attention_(config_, config_.attention_layers() + (draft_head ? 1 : 0), kv_cache_type),
      tensors_(folder, config_) {
  config_.tied = tensors_.tied();
  norm_ = tensors_.norm();
  const StoredMatrix embeddings = tensors_.embeddings();
  if (config_.tied) {
    head_ = packed(std::span(&embeddings, 1), at_least_int8(weights));
  } else {
    embeddings_ = PackedWeight(std::span(&embeddings, 1), WeightType::float32);
    const StoredMatrix head = tensors_.head();
    head_ = packed(std::span(&head, 1), at_least_int8(weights));
  }
  for (std::int64_t i = 0; i < config_.layers(); ++i) add_layer(tensors_.layer(i, mixers_.plan()), weights);
  if (draft_head) {
    draft_head_.emplace(tensors_.draft_head(), config_, attention_, config_.tied ? head_ : embeddings_, head_, weights);
  }
  skipped_ = tensors_.check_all_read();
  parameters_ = tensors_.elements_read();
}

void FamilyModel::add_layer(const LayerTensors& from, WeightType weights) {
  layers_.push_back({from.attends,
                     from.attends ? attention_.add(from.attention, at_least_int8(weights))
                                  : add_mixer(from.mixer, at_least_int8(weights)),
                     from.before_mixer, from.after_mixer, from.before_mlp, from.after_mlp,
                     LayerMlp(from, config_.experts, weights)});
}

// Adds a delta layer's mixer and returns its number.
std::int64_t FamilyModel::add_mixer(const MixerTensors& from, WeightType weights) {
  const MixerConfig& config = mixers_.plan().config;
  const DecayRates decay = decay_rates(from.dt_bias, from.a_log);
  DeltaMixers::Layer mixer;
  mixer.o_norm = from.o_norm;
  mixer.taps = from.taps;
  mixer.beta_factor.assign(static_cast<std::size_t>(config.value_heads), static_cast<float>(config.beta_scale));
  mixer.rate = decay.rate;
  mixer.dt_bias = decay.bias;
  mixer.in = packed(from.in, weights);
  mixer.o_proj = packed(std::span(&from.out, 1), weights);
  mixers_.add(std::move(mixer));
  return std::ranges::count(layers_, false, &Layer::attends);
}

std::size_t FamilyModel::weight_bytes() const {
  std::size_t total = mixers_.weight_bytes() + attention_.weight_bytes() + head_.bytes() + embeddings_.bytes();
  for (const auto& layer : layers_) total += layer.mlp.bytes();
  return draft_head_ ? total + draft_head_->bytes() : total;
}

std::size_t FamilyModel::constant_bytes() const {
  return (mixers_.state_floats() + static_cast<std::size_t>(draft_head_ ? draft_head_->width() : 0)) * sizeof(float);
}

std::vector<StatePart> FamilyModel::state_parts() const {
  auto parts = family_state_parts(config_, mixers_.plan());
  if (draft_head_) {
    const std::int64_t width = draft_head_->width();
    parts.push_back({"draft_head.hidden", {width}, mixers_.state_floats(), static_cast<std::size_t>(width)});
  }
  return parts;
}

void FamilyModel::make_slots(std::int64_t slots) {
  states_.emplace(slots, mixers_.state_floats());
  if (draft_head_) draft_head_->make_slots(slots);
  attention_.pages().make_slots(slots);
}

void FamilyModel::clear(std::int64_t slot) {
  std::ranges::fill(states_->slot(slot), 0.0F);
  if (draft_head_) std::ranges::fill(draft_head_->hidden(slot), 0.0F);
  attention_.pages().clear(slot);
}

void FamilyModel::set(std::int64_t slot, const TextState& state) {
  const auto constant = std::span(*state.constant);
  std::ranges::copy(constant.first(mixers_.state_floats()), states_->slot(slot).begin());
  if (draft_head_) std::ranges::copy(constant.subspan(mixers_.state_floats()), draft_head_->hidden(slot).begin());
  attention_.pages().set(slot, state.tokens, state.pages);
}

void FamilyModel::copy(std::int64_t from, std::int64_t to, std::int64_t tokens) {
  std::ranges::copy(states_->slot(from), states_->slot(to).begin());
  if (draft_head_) std::ranges::copy(draft_head_->hidden(from), draft_head_->hidden(to).begin());
  attention_.pages().copy(from, to, tokens);
}

TextState FamilyModel::state(std::int64_t slot, std::int64_t tokens) {
  const auto memory = states_->slot(slot), hidden = draft_head_ ? draft_head_->hidden(slot) : std::span<float>();
  auto constant = std::make_shared<std::vector<float>>();
  constant->reserve(memory.size() + hidden.size());
  constant->insert(constant->end(), memory.begin(), memory.end());
  constant->insert(constant->end(), hidden.begin(), hidden.end());
  return {tokens, std::move(constant), attention_.pages().pages(slot, tokens)};
}

void FamilyModel::advance(std::span<const std::int32_t> ids, std::span<const TextRun> runs,
                          const View<float, 2>& hidden, ThreadPool& pool, std::vector<Draft>* drafts) {
  const std::int64_t rows = std::ssize(ids);
  mixers_.begin(rows, runs, drafts);
  attention_.begin(runs);
  const View<float, 2> x = x_.rows(rows, config_.hidden_size), part = normed_.rows(rows, config_.hidden_size);
  const PackedWeight& embeddings = config_.tied ? head_ : embeddings_;
  for (std::int64_t row = 0; row < rows; ++row) embeddings.copy_row(ids[static_cast<std::size_t>(row)], x.at(row));
  const auto norm_or_copy = [&](const View<float, 2>& from, const Vector& weight) {
    if (!weight.empty()) return norm_rows(from, weight, config_.norm_eps, part, pool);
    if (from.data != part.data) std::copy_n(from.data, from.size(), part.data);
  };
  for (const auto& layer : layers_) {
    norm_or_copy(x, layer.before_mixer);
    layer.attends ? attention_.attend(layer.index, part, part, runs, pool)
                  : mixers_.mix(layer.index, part, part, runs, *states_, pool);
    norm_or_copy(part, layer.after_mixer);
    add_rows(x, part);
    norm_or_copy(x, layer.before_mlp);
    layer.mlp.apply(part, rows_, pool);
    norm_or_copy(part, layer.after_mlp);
    add_rows(x, part);
  }
  norm_rows(x, norm_, config_.norm_eps, hidden, pool);
  if (draft_head_) draft_head_->read(ids, runs, hidden, drafts, pool);
}

// Keys and values of tokens that are not accepted stay in the pages, and are overwritten by the tokens in their place.
void FamilyModel::accept(const Draft& draft, std::int64_t tokens, ThreadPool& pool) {
  mixers_.accept(draft, tokens, *states_, pool);
  if (draft_head_) draft_head_->accept(draft, tokens);
}

void FamilyModel::logits(const View<const float, 2>& hidden, const View<float, 2>& logits, ThreadPool& pool) const {
  head_.apply(hidden, logits, pool);
}

}  // namespace efla::nn
