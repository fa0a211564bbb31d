#include "efla/nn/inference/inference_model.h"

#include <torch/types.h>

#include <algorithm>
#include <string>
#include <utility>

#include "efla/base/error.h"
#include "efla/nn/named_tensor.h"
#include "efla/ops/layers/glu.h"

namespace efla::nn {
namespace {

// Returns the elements of a tensor; none of an undefined tensor.
Vector values_of(const torch::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto flat = tensor.detach().contiguous().flatten();
  return Vector(flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel());
}

}  // namespace

std::string InferenceModel::refusal(const LanguageModelConfig& config) {
  return config.attention_layers.empty() ? MixerPlan(config.mixer_config()).refusal() : "layers of softmax attention";
}

InferenceModel::InferenceModel(const LanguageModel& model, WeightType weights)
    : config_(model.config()), mixers_(config_.mixer_config()) {
  if (const auto reason = refusal(config_); !reason.empty()) {
    throw Error("inference", "model", reason, "a state of constant size, and short convolutions with silu");
  }
  const auto named = model.named_parameters();
  norm_ = values_of(named["model.norm.weight"]);
  if (!config_.tie_word_embeddings) embeddings_ = named["model.embeddings.weight"].detach().contiguous();
  head_ = PackedWeight({model.head()}, at_least_int8(weights));
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    add_layer(LayerParameters(model, mixers_.plan(), i), weights);
  }
}

void InferenceModel::add_layer(const LayerParameters& from, WeightType weights) {
  DeltaMixers::Layer mixer;
  mixer.o_norm = values_of(from.o_norm);
  mixer.taps = values_of(from.taps);
  mixer.beta_factor = values_of(from.beta_factor);
  mixer.rate = values_of(from.rate);
  mixer.dt_bias = values_of(from.dt_bias);
  mixer.gate_bias = values_of(from.gate_bias);
  mixer.correction = values_of(from.correction);
  const WeightType of_mixer = at_least_int8(weights);
  mixer.in = PackedWeight(from.in, of_mixer);
  if (from.f_out.defined()) mixer.f_out = PackedWeight({from.f_out}, of_mixer);
  if (from.g_out.defined()) mixer.g_out = PackedWeight({from.g_out}, of_mixer);
  mixer.o_proj = PackedWeight({from.o_proj}, of_mixer);
  mixers_.add(std::move(mixer));

  Layer layer;
  layer.attn_norm = values_of(from.attn_norm);
  layer.mlp_norm = values_of(from.mlp_norm);
  layer.gate_up = PackedWeight({from.gate, from.up}, weights);
  layer.down = PackedWeight({from.down}, weights);
  layers_.push_back(std::move(layer));
}

std::size_t InferenceModel::weight_bytes() const {
  std::size_t total = mixers_.weight_bytes() + head_.bytes() + (embeddings_.defined() ? embeddings_.nbytes() : 0);
  for (const auto& layer : layers_) total += layer.gate_up.bytes() + layer.down.bytes();
  return total;
}

std::vector<StatePart> InferenceModel::state_parts() const {
  std::vector<std::string> prefixes;
  for (std::size_t i = 0; i < layers_.size(); ++i) prefixes.push_back("layers." + std::to_string(i) + ".");
  return mixers_.state_parts(prefixes);
}

void InferenceModel::copy_state(const LanguageModelState& from, std::span<float> slot) const {
  const auto parts = state_parts();
  const auto tensors = from.tensors();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::copy_n(tensors[i].second.data_ptr<float>(), parts[i].floats, slot.begin() + parts[i].offset);
  }
}

void InferenceModel::copy_state(std::span<const float> slot, LanguageModelState& to) const {
  const auto parts = state_parts();
  const auto tensor_of = [&](const StatePart& part) {
    const auto tensor = torch::empty(part.shape);
    std::copy_n(slot.begin() + part.offset, part.floats, tensor.data_ptr<float>());
    return tensor;
  };
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    auto& mixer = std::get<MixerState>(to.layers[i]);
    mixer.memory = tensor_of(parts[2 * i]);
    mixer.conv = tensor_of(parts[2 * i + 1]);
  }
}

void InferenceModel::advance(std::span<const std::int32_t> ids, std::span<const TextRun> runs, StatePool& states,
                             const View<float, 2>& hidden, ThreadPool& pool, std::vector<Draft>* drafts) {
  const std::int64_t rows = std::ssize(ids), width = config_.hidden_size, inner = config_.mlp_width();
  mixers_.begin(rows, runs, drafts);
  const View<float, 2> x = x_.rows(rows, width), normed = normed_.rows(rows, width);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t id = ids[static_cast<std::size_t>(row)];
    if (embeddings_.defined()) {
      std::copy_n(embeddings_.data_ptr<float>() + id * width, width, x.at(row));
    } else {
      head_.copy_row(id, x.at(row));
    }
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    norm_rows(x, layer.attn_norm, config_.norm_eps, normed, pool);
    mixers_.mix(static_cast<std::int64_t>(i), normed, normed, runs, states, pool);
    add_rows(x, normed);
    norm_rows(x, layer.mlp_norm, config_.norm_eps, normed, pool);
    const View<float, 2> both = inner_.rows(rows, 2 * inner), product = product_.rows(rows, inner);
    layer.gate_up.apply(normed, both, pool);
    glu_forward<float>({columns_of(both, {0, inner}), columns_of(both, {inner, inner}), product},
                       {.context = {.pool = &pool}});
    layer.down.apply(product, normed, pool);
    add_rows(x, normed);
  }
  norm_rows(x, norm_, config_.norm_eps, hidden, pool);
}

void InferenceModel::accept(const Draft& draft, std::int64_t tokens, StatePool& states, ThreadPool& pool) {
  mixers_.accept(draft, tokens, states, pool);
}

void InferenceModel::logits(const View<const float, 2>& hidden, const View<float, 2>& logits, ThreadPool& pool) const {
  head_.apply(hidden, logits, pool);
}

void round_weights(LanguageModel& model, WeightType weights) {
  const torch::NoGradGuard no_grad;
  const bool tied = model.config().tie_word_embeddings;
  for (const auto& parameter : model.named_parameters()) {
    if (parameter.value().dim() != 2 || (parameter.key() == "model.embeddings.weight" && !tied)) continue;
    const auto cpu = parameter.value().detach().cpu();
    const bool of_mlp = parameter.key().find(".mlp.") != std::string::npos;
    torch::Tensor(parameter.value()).copy_(PackedWeight({cpu}, of_mlp ? weights : at_least_int8(weights)).widened());
  }
}

}  // namespace efla::nn
