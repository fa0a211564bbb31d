#include "efla/nn/inference/inference_model.h"

#include <torch/types.h>

#include <algorithm>

#include "efla/base/check.h"
#include "efla/base/error.h"
#include "efla/nn/inference/inference_layers.h"
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

void add(const View<float, 2>& to, const View<float, 2>& x) {
  for (std::int64_t i = 0; i < to.size(); ++i) to.data[i] += x.data[i];
}

}  // namespace

StatePool::StatePool(std::int64_t slots, std::size_t slot_floats)
    : slots_(slots),
      slot_floats_(slot_floats),
      data_(std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(slots) * slot_floats)) {}

std::string InferenceModel::refusal(const LanguageModelConfig& config) {
  return config.attention_layers.empty() ? MixerPlan(config.mixer_config()).refusal() : "layers of softmax attention";
}

InferenceModel::InferenceModel(const LanguageModel& model, WeightType weights)
    : config_(model.config()), plan_(config_.mixer_config()), buffers_(std::make_unique<Buffers>()) {
  if (const auto reason = refusal(config_); !reason.empty()) {
    throw Error("inference", "model", reason, "a state of constant size, and short convolutions with silu");
  }
  memory_floats_ = plan_.values() * plan_.config.key_dim;
  layer_floats_ = memory_floats_ + (plan_.config.conv - 1) * plan_.channels();
  state_floats_ = static_cast<std::size_t>(config_.num_hidden_layers * layer_floats_);

  const auto named = model.named_parameters();
  norm_ = values_of(named["model.norm.weight"]);
  if (!config_.tie_word_embeddings) embeddings_ = named["model.embeddings.weight"].detach().contiguous();
  head_ = PackedWeight({model.head()}, weights);
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    layers_.push_back(packed(LayerParameters(model, plan_, i), weights));
  }
}

InferenceModel::~InferenceModel() = default;

InferenceModel::Layer InferenceModel::packed(const LayerParameters& from, WeightType weights) {
  Layer layer;
  layer.attn_norm = values_of(from.attn_norm);
  layer.mlp_norm = values_of(from.mlp_norm);
  layer.o_norm = values_of(from.o_norm);
  layer.taps = values_of(from.taps);
  layer.beta_factor = values_of(from.beta_factor);
  layer.rate = values_of(from.rate);
  layer.dt_bias = values_of(from.dt_bias);
  layer.gate_bias = values_of(from.gate_bias);
  layer.in = PackedWeight(from.in, weights);
  if (from.f_out.defined()) layer.f_out = PackedWeight({from.f_out}, weights);
  if (from.g_out.defined()) layer.g_out = PackedWeight({from.g_out}, weights);
  layer.o_proj = PackedWeight({from.o_proj}, weights);
  layer.gate_up = PackedWeight({from.gate, from.up}, weights);
  layer.down = PackedWeight({from.down}, weights);
  return layer;
}

std::size_t InferenceModel::weight_bytes() const {
  std::size_t total = head_.bytes() + (embeddings_.defined() ? embeddings_.nbytes() : 0);
  for (const auto& layer : layers_) {
    for (const auto* weight : {&layer.in, &layer.f_out, &layer.g_out, &layer.o_proj, &layer.gate_up, &layer.down}) {
      total += weight->bytes();
    }
  }
  return total;
}

std::vector<StatePart> InferenceModel::state_parts() const {
  std::vector<StatePart> parts;
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    const auto first = static_cast<std::size_t>(i * layer_floats_), memory = static_cast<std::size_t>(memory_floats_);
    const std::string prefix = "layers." + std::to_string(i) + ".";
    parts.push_back({prefix + "memory",
                     {1, plan_.config.value_heads, plan_.config.key_dim, plan_.config.value_dim},
                     first,
                     memory});
    parts.push_back({prefix + "conv",
                     {1, plan_.config.conv - 1, plan_.channels()},
                     first + memory,
                     static_cast<std::size_t>(layer_floats_ - memory_floats_)});
  }
  return parts;
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
  auto& own = *buffers_;
  own.rows = static_cast<std::int64_t>(ids.size());
  own.decodes = 0;
  own.drafts = drafts;
  if (drafts != nullptr) drafts->clear();
  for (const auto& run : runs) {
    if (run.decode && run.tokens == 1) ++own.decodes;
    if (!run.decode || run.tokens == 1) continue;
    Require("advance")(drafts != nullptr, "drafts", "none", "a list, because a text decodes several tokens");
    drafts->push_back({run, {}, {}, {}, {}});
  }
  const std::int64_t width = config_.hidden_size, inner = config_.mlp_width();
  const View<float, 2> x = own.x.rows(own.rows, width), normed = own.normed.rows(own.rows, width);
  for (std::int64_t row = 0; row < own.rows; ++row) {
    const std::int64_t id = ids[static_cast<std::size_t>(row)];
    if (embeddings_.defined()) {
      std::copy_n(embeddings_.data_ptr<float>() + id * width, width, x.at(row));
    } else {
      head_.copy_row(id, x.at(row));
    }
  }
  for (const auto& layer : layers_) {
    norm(x, layer.attn_norm, config_.norm_eps, normed, pool);
    mix(layer, runs, states, pool);
    add(x, normed);
    norm(x, layer.mlp_norm, config_.norm_eps, normed, pool);
    const View<float, 2> both = own.inner.rows(own.rows, 2 * inner), product = own.product.rows(own.rows, inner);
    layer.gate_up.apply(normed, both, pool);
    glu_forward<float>({columns_of(both, {0, inner}), columns_of(both, {inner, inner}), product},
                       {.context = {.pool = &pool}});
    layer.down.apply(product, normed, pool);
    add(x, normed);
  }
  norm(x, norm_, config_.norm_eps, hidden, pool);
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
    torch::Tensor(parameter.value()).copy_(PackedWeight({cpu}, weights).widened());
  }
}

}  // namespace efla::nn
