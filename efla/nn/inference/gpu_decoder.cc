#include "efla/nn/inference/gpu_decoder.h"

#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "efla/autograd/layers/linear.h"
#include "efla/autograd/layers/rms_norm.h"
#include "efla/base/error.h"
#include "efla/torch/graph_replay.h"

namespace efla::nn {

using torch::Tensor;

struct GpuDecoder::Identity {};

struct GpuDecoder::Layer {
  LayerParameters from;
  StepMixer mixer = {};  // of a layer with a mixer
  Tensor in = {};        // of an attention
  Tensor o_proj = {}, gate_up = {}, down = {};
  bool has_mixer = false;  // whether the kernel mixer_step takes the layer's mixer
};

// The graph of the steps of one state, whose tensors are `held`.
struct GpuDecoder::Cache : DecodeCache {
  std::shared_ptr<const Identity> decoder;
  std::vector<Tensor> held;
  libtorch::GraphReplay graph;
};

GpuDecoder::GpuDecoder(const LanguageModel& model, WeightType weights, std::int64_t drawable)
    : model_(model),
      identity_(std::make_shared<Identity>()),
      weights_(weights),
      drawable_(drawable),
      plan_(model.config().mixer_config()) {
  if (is_integer(weights)) {
    throw Error("model", "weights", std::string(name_of(weights)) + " on a GPU", "float32 or bfloat16");
  }
  const torch::NoGradGuard no_grad;
  const auto named = model.named_parameters();
  embeddings_ = named["model.embeddings.weight"].detach();
  norm_ = named["model.norm.weight"].detach();
  head_ = packed({model.head()});
  auto state = model.initial_state(1);
  for (std::size_t i = 0; i < state.layers.size(); ++i) {
    layers_.push_back(packed_layer(static_cast<std::int64_t>(i)));
    Layer& layer = layers_.back();
    if (!layer.from.has_mixer()) continue;
    const auto& mixer = std::get<MixerState>(state.layers[i]);
    layer.has_mixer = takes_step(plan_, layer.mixer, {mixer.memory, mixer.conv});
  }
}

GpuDecoder::~GpuDecoder() = default;

// Returns the rows of all parts as one tensor in the type of the weights.
Tensor GpuDecoder::packed(const std::vector<Tensor>& parts) const {
  const auto rows = parts.size() == 1 ? parts[0].detach() : torch::cat(parts);
  return rows.to(weights_ == WeightType::bfloat16 ? torch::kBFloat16 : torch::kFloat).contiguous();
}

GpuDecoder::Layer GpuDecoder::packed_layer(std::int64_t index) const {
  Layer layer{LayerParameters(model_, plan_, index)};
  const auto& from = layer.from;
  layer.gate_up = packed({from.gate, from.up});
  layer.down = packed({from.down});
  if (from.in.empty()) return layer;
  layer.o_proj = packed({from.o_proj});
  if (!from.has_mixer()) {
    layer.in = packed(from.in);
    return layer;
  }
  layer.mixer = {.in = packed(from.in),
                 .o_norm = from.o_norm,
                 .taps = from.taps,
                 .beta_factor = from.beta_factor,
                 .rate = from.rate,
                 .dt_bias = from.dt_bias,
                 .gate_bias = from.gate_bias};
  if (from.f_out.defined()) layer.mixer.f_out = packed({from.f_out});
  if (from.g_out.defined()) layer.mixer.g_out = packed({from.g_out});
  return layer;
}

// Returns x plus the output of the mixer or the attention of layer `index`, for x [B, D].
Tensor GpuDecoder::mix(std::size_t index, const Tensor& x, LanguageModelState& state,
                       const std::optional<AttentionStep>& attention) const {
  const Layer& layer = layers_[index];
  const double eps = model_.config().norm_eps;
  if (const auto* cache = std::get_if<KeyValueCache>(&state.layers[index])) {
    const auto qkv = autograd::fused_linear(x, layer.in, {.norm_weight = layer.from.attn_norm, .norm_eps = eps});
    const auto o = attend_one(model_.config().attention_config(), *attention, qkv, *cache);
    return autograd::fused_linear(o, layer.o_proj, {.residual = x});
  }
  if (!layer.has_mixer) {
    const auto normed = autograd::rms_norm(x, layer.from.attn_norm, eps);
    return x + model_.mix(index, normed.unsqueeze(1), state).squeeze(1);
  }
  const auto projected = project(plan_, layer.mixer, x, {layer.from.attn_norm, eps});
  const auto& mixer = std::get<MixerState>(state.layers[index]);
  const auto o = step_mixer(plan_, layer.mixer, projected, {mixer.memory, mixer.conv});
  return autograd::fused_linear(o, layer.o_proj, {.residual = x});
}

// Returns the output [B, D] of all layers for the ids [B] of tokens that go to slot [1] int64 of caches of keys and
// values.
Tensor GpuDecoder::stack_output(const Tensor& ids, const Tensor& slot, LanguageModelState& state) const {
  const double eps = model_.config().norm_eps;
  std::optional<AttentionStep> attention;
  for (const auto& layer : state.layers) {
    const auto* cache = std::get_if<KeyValueCache>(&layer);
    if (cache == nullptr) continue;
    attention.emplace(model_.config().attention_config(), slot, state.starts, cache->key_slots().size(2));
    break;
  }
  Tensor x = torch::embedding(embeddings_, ids);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    x = mix(i, x, state, attention);
    const auto inner =
        autograd::fused_linear(x, layer.gate_up, {.norm_weight = layer.from.mlp_norm, .norm_eps = eps, .swiglu = true});
    x = autograd::fused_linear(inner, layer.down, {.residual = x});
  }
  return x;
}

std::shared_ptr<GpuDecoder::Cache> GpuDecoder::cache_for(LanguageModelState& state) const {
  std::vector<Tensor> held;
  for (const auto& layer : state.layers) {
    if (const auto* mixer = std::get_if<MixerState>(&layer)) {
      held.push_back(mixer->memory);
      if (mixer->conv.defined()) held.push_back(mixer->conv);
    } else {
      const auto& cache = std::get<KeyValueCache>(layer);
      held.insert(held.end(), {cache.key_slots(), cache.value_slots()});
    }
  }
  if (state.starts.defined()) held.push_back(state.starts);
  auto known = std::static_pointer_cast<Cache>(state.decode);
  const auto is_same = [](const Tensor& a, const Tensor& b) { return a.is_same(b); };
  if (known && known->decoder == identity_ &&
      std::equal(held.begin(), held.end(), known->held.begin(), known->held.end(), is_same)) {
    return known;
  }

  auto cache = std::make_shared<Cache>();
  cache->decoder = identity_;
  cache->held = held;
  state.decode = cache;
  return cache;
}

std::unique_ptr<libtorch::Bfloat16OnGpu> GpuDecoder::use_precision() const {
  return weights_ == WeightType::bfloat16 ? std::make_unique<libtorch::Bfloat16OnGpu>() : nullptr;
}

Tensor GpuDecoder::prefill(const Tensor& ids, LanguageModelState& state) const {
  const auto precision = use_precision();
  return model_.prefill(ids, state);
}

StepOutput GpuDecoder::step(const Tensor& ids, LanguageModelState& state) const {
  model_.check_ids(ids, 1);
  return step_drawn(ids.to(embeddings_.device()), state);
}

StepOutput GpuDecoder::step_drawn(const Tensor& ids, LanguageModelState& state) const {
  const torch::NoGradGuard no_grad;
  model_.check_state(state, ids.size(0));
  for (auto& layer : state.layers) {
    if (auto* cache = std::get_if<KeyValueCache>(&layer)) cache->reserve(1);
  }
  const auto cache = cache_for(state);
  const double eps = model_.config().norm_eps;
  const auto decode = [&](const std::vector<Tensor>& inputs) -> std::vector<Tensor> {
    const Tensor x = stack_output(inputs[0], inputs[1], state);
    const Tensor all = autograd::fused_linear(x, head_, {.norm_weight = norm_, .norm_eps = eps});
    const auto output = step_output(all, drawable_);
    return {output.logits, output.likeliest};
  };
  const Tensor slot = torch::full({1}, state.tokens, ids.options());
  const auto outputs = cache->graph.call(decode, {ids, slot}, cache->held);
  for (auto& layer : state.layers) {
    if (auto* written = std::get_if<KeyValueCache>(&layer)) written->count_token();
  }
  ++state.tokens;
  return {outputs[0], outputs[1]};
}

Tensor GpuDecoder::advance(const Tensor& ids, LanguageModelState& state) const {
  const torch::NoGradGuard no_grad;
  const auto precision = use_precision();
  return model_.advance(ids, state).to(torch::kFloat);
}

Tensor GpuDecoder::advance_packed(const Tensor& ids, const Tensor& cu_seqlens, LanguageModelState& state) const {
  const torch::NoGradGuard no_grad;
  const auto precision = use_precision();
  return model_.advance_packed(ids, cu_seqlens, state).to(torch::kFloat);
}

Tensor GpuDecoder::logits(const Tensor& hidden) const {
  const torch::NoGradGuard no_grad;
  return autograd::fused_linear(hidden, head_);
}

}  // namespace efla::nn
