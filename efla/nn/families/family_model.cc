#include "efla/nn/families/family_model.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>

#include "efla/ops/layers/glu.h"
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

// Lets the system take the memory of a matrix that is not read again. Pages of a file come back if they are.
void release(const StoredMatrix& matrix) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = matrix.narrow ? std::bit_cast<std::uintptr_t>(matrix.narrow.data)
                                   : std::bit_cast<std::uintptr_t>(matrix.wide.data);
  const auto bytes = matrix.narrow ? matrix.narrow.size() * std::int64_t{sizeof(bfloat16)}
                                   : matrix.wide.size() * std::int64_t{sizeof(float)};
  const auto begin = (first + page - 1) / page * page;
  const auto end = (first + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (begin < end) ::madvise(std::bit_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

// Packs matrices, and releases the ones that are copied to another type.
PackedWeight packed(std::span<const StoredMatrix> matrices, WeightType type) {
  PackedWeight weight(matrices, type, true);
  for (const auto& matrix : matrices) {
    const bool copied = type == WeightType::int8 || (type == WeightType::bfloat16 && !matrix.narrow);
    if (copied && !matrix.keep) release(matrix);
  }
  return weight;
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
  layer.gate_up = packed(from.gate_up, weights);
  layer.down = packed(std::span(&from.down, 1), weights);
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
  for (const auto& layer : layers_) total += layer.gate_up.bytes() + layer.down.bytes();
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

// Replaces the rows x by the MLP's output.
void FamilyModel::apply_mlp(const Layer& layer, const View<float, 2>& x, ThreadPool& pool) {
  const std::int64_t rows = x.extent[0], inner = config_.intermediate_size;
  const View<float, 2> both = inner_.rows(rows, 2 * inner), product = product_.rows(rows, inner);
  layer.gate_up.apply(x, both, pool);
  glu_forward<float>({columns_of(both, {0, inner}), columns_of(both, {inner, inner}), product},
                     {.context = {.pool = &pool}});
  layer.down.apply(product, x, pool);
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
    apply_mlp(layer, part, pool);
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
