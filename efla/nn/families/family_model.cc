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

FamilyModel::FamilyModel(const std::filesystem::path& folder, WeightType weights, KeyValueType kv_cache_type)
    : config_(load_family_config(folder)),
      mixers_(config_.mixer),
      attention_(config_, kv_cache_type),
      tensors_(folder, config_) {
  config_.tied = tensors_.tied();
  norm_ = tensors_.norm();
  const StoredMatrix embeddings = tensors_.embeddings();
  if (config_.tied) {
    head_ = packed(std::span(&embeddings, 1), weights);
  } else {
    embeddings_ = PackedWeight(std::span(&embeddings, 1), WeightType::float32);
    const StoredMatrix head = tensors_.head();
    head_ = packed(std::span(&head, 1), weights);
  }
  for (std::int64_t i = 0; i < config_.layers(); ++i) add_layer(tensors_.layer(i, mixers_.plan()), weights);
  skipped_ = tensors_.check_all_read();
  parameters_ = tensors_.elements_read();
}

void FamilyModel::add_layer(const LayerTensors& from, WeightType weights) {
  Layer layer;
  layer.attends = from.attends;
  layer.index = std::ranges::count(layers_, layer.attends, &Layer::attends);
  layer.before_mixer = from.before_mixer;
  layer.after_mixer = from.after_mixer;
  layer.before_mlp = from.before_mlp;
  layer.after_mlp = from.after_mlp;
  if (from.experts) {
    layer.experts.emplace(*from.experts, config_.experts, weights);
  } else {
    layer.mlp = RowsMlp(from.mlp, weights);
  }
  layers_.push_back(std::move(layer));
  if (from.attends) {
    const AttentionTensors& own = from.attention;
    attention_.add({own.q_norm, own.k_norm, packed(own.in, weights), packed(std::span(&own.out, 1), weights)});
    return;
  }
  const MixerTensors& own = from.mixer;
  const MixerConfig& config = mixers_.plan().config;
  const DecayRates decay = decay_rates(own.dt_bias, own.a_log);
  DeltaMixers::Layer mixer;
  mixer.o_norm = own.o_norm;
  mixer.taps = own.taps;
  mixer.beta_factor.assign(static_cast<std::size_t>(config.value_heads), static_cast<float>(config.beta_scale));
  mixer.rate = decay.rate;
  mixer.dt_bias = decay.bias;
  mixer.in = packed(own.in, weights);
  mixer.o_proj = packed(std::span(&own.out, 1), weights);
  mixers_.add(std::move(mixer));
}

std::size_t FamilyModel::weight_bytes() const {
  std::size_t total = mixers_.weight_bytes() + attention_.weight_bytes() + head_.bytes() + embeddings_.bytes();
  for (const auto& layer : layers_) total += layer.experts ? layer.experts->bytes() : layer.mlp.bytes();
  return total;
}

std::vector<StatePart> FamilyModel::state_parts() const { return family_state_parts(config_, mixers_.plan()); }

void FamilyModel::make_slots(std::int64_t slots) {
  states_.emplace(slots, mixers_.state_floats());
  attention_.pages().make_slots(slots);
}

void FamilyModel::clear(std::int64_t slot) {
  std::ranges::fill(states_->slot(slot), 0.0F);
  attention_.pages().clear(slot);
}

void FamilyModel::set(std::int64_t slot, const TextState& state) {
  std::ranges::copy(*state.constant, states_->slot(slot).begin());
  attention_.pages().set(slot, state.tokens, state.pages);
}

void FamilyModel::copy(std::int64_t from, std::int64_t to, std::int64_t tokens) {
  std::ranges::copy(states_->slot(from), states_->slot(to).begin());
  attention_.pages().copy(from, to, tokens);
}

TextState FamilyModel::state(std::int64_t slot, std::int64_t tokens) {
  const auto constant = states_->slot(slot);
  return {tokens, std::make_shared<std::vector<float>>(constant.begin(), constant.end()),
          attention_.pages().pages(slot, tokens)};
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
    layer.experts ? layer.experts->apply(part, rows_, pool) : layer.mlp.apply(part, part, rows_, pool);
    norm_or_copy(part, layer.after_mlp);
    add_rows(x, part);
  }
  norm_rows(x, norm_, config_.norm_eps, hidden, pool);
}

// Keys and values of tokens that are not accepted stay in the pages, and are overwritten by the tokens in their place.
void FamilyModel::accept(const Draft& draft, std::int64_t tokens, ThreadPool& pool) {
  mixers_.accept(draft, tokens, *states_, pool);
}

void FamilyModel::logits(const View<const float, 2>& hidden, const View<float, 2>& logits, ThreadPool& pool) const {
  head_.apply(hidden, logits, pool);
}

}  // namespace efla::nn
