#include "efla/nn/models/language_model.h"

#include <torch/types.h>

#include <algorithm>
#include <string>
#include <utility>

#include "efla/autograd/layers/cross_entropy.h"
#include "efla/autograd/layers/linear.h"
#include "efla/autograd/layers/lookup.h"
#include "efla/autograd/recompute.h"
#include "efla/autograd/tensor_view.h"
#include "efla/base/error.h"
#include "efla/base/memory.h"

namespace efla::nn {
namespace {

using torch::Tensor;

constexpr const char* kName = "language model";

// Tokens per step of a prefill, over all sequences. A GPU needs more tokens at once than a CPU to be busy.
constexpr std::int64_t kPrefillTokens = 2048, kPrefillTokensOnGpu = 8192;

void require_room_for(const LanguageModelConfig& config) {
  require_memory("language model", "sizes vocab_size, hidden_size, num_hidden_layers", "parameters",
                 sizeof(float) * config.least_parameters());
}

}  // namespace

LanguageModel::LanguageModel(const LanguageModelConfig& config, const Initialiser& given)
    : config_((validate(config), require_room_for(config), config)) {
  const Initialiser init = given.with_deviation(config.initializer_range);
  const auto table = [&](const Initialiser& part) {
    return std::make_shared<Weight>(part.weight({config.vocab_size, config.hidden_size}, config.hidden_size));
  };
  const auto model = register_module("model", std::make_shared<torch::nn::Module>());
  embeddings_ = model->register_module("embeddings", table(init.within("model").within("embeddings")));
  const auto stack = model->register_module("layers", std::make_shared<torch::nn::Module>());
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const auto name = std::to_string(i);
    const auto part = init.within("model").within("layers").within(name);
    layers_.push_back(stack->register_module(name, std::make_shared<Block>(block_config(i), part)));
  }
  norm_ = add_norm(*model, "norm", config.hidden_size);
  head_ = config.tie_word_embeddings ? embeddings_ : register_module("lm_head", table(init.within("lm_head")));
}

BlockConfig LanguageModel::block_config(std::int64_t index) const {
  BlockConfig block{.mixer_name = "attn", .mlp_width = config_.mlp_width(), .norm_eps = config_.norm_eps};
  if (config_.is_attention(index)) {
    block.mixer = config_.attention_config();
  } else {
    MixerConfig mixer = config_.mixer_config();
    mixer.layer = index;
    mixer.layers = config_.num_hidden_layers;
    block.mixer = mixer;
  }
  return block;
}

void LanguageModel::set_recompute(bool recompute) {
  if (recompute && mixer_preset(config_.mixer).rwkv7) {
    throw Error(kName, "recompute", "true",
                "false for " + config_.mixer + ", whose layers read values of the first one");
  }
  recompute_ = recompute;
}

std::int64_t LanguageModel::parameter_count() const {
  std::int64_t count = 0;
  for (const auto& parameter : parameters()) count += parameter.numel();
  return count;
}

void LanguageModel::check_ids(const Tensor& ids, std::int64_t rank) const {
  if (!ids.defined() || ids.dim() != rank || ids.scalar_type() != torch::kLong || ids.numel() == 0) {
    throw Error(kName, "ids", ids.defined() ? autograd::shape_text(ids) : "nothing",
                rank == 1 ? "int64 [B]" : "int64 [B, T] with tokens");
  }
  const auto wrong = ids.lt(0).logical_or_(ids.ge(config_.vocab_size));
  if (wrong.any().item<bool>()) {
    throw Error(kName, "ids", "token " + std::to_string(ids.masked_select(wrong)[0].item<std::int64_t>()),
                "0 to " + std::to_string(config_.vocab_size - 1));
  }
}

Tensor LanguageModel::checked_cu_seqlens(const Tensor& ids, const Tensor& cu_seqlens) const {
  check_ids(ids, 2);
  if (!cu_seqlens.defined()) return {};
  autograd::check_cu_seqlens(kName, cu_seqlens, ids.size(0), ids.size(1));
  return cu_seqlens.to(ids.device());
}

Tensor LanguageModel::hidden(const Tensor& ids, const Tensor& cu_seqlens) const {
  return hidden_of(ids, checked_cu_seqlens(ids, cu_seqlens));
}

Tensor LanguageModel::hidden_of(const Tensor& ids, const Tensor& cu_seqlens) const {
  Stream stream{autograd::embedding(embeddings_->value, ids), {}};
  for (const auto& layer : layers_) {
    if (!recompute_) {
      stream = layer->forward(stream, cu_seqlens);
      continue;
    }
    const auto summed = [layer, cu_seqlens](const Tensor& x) {
      const Stream out = layer->forward({x, {}}, cu_seqlens);
      return out.x + out.branch;
    };
    stream = {autograd::recompute(summed, stream.x, layer->parameters()), {}};
  }
  return add_and_norm(stream, *norm_, config_.norm_eps).second;
}

Tensor LanguageModel::logits(const Tensor& ids, const Tensor& cu_seqlens) const {
  return autograd::linear(hidden(ids, cu_seqlens), head()).to(torch::kFloat);
}

Tensor LanguageModel::loss(const Tensor& ids, const Tensor& targets, const Tensor& cu_seqlens) const {
  const Tensor on_device = checked_cu_seqlens(ids, cu_seqlens);
  if (!targets.defined() || targets.sizes() != ids.sizes()) {
    throw Error(kName, "targets", targets.defined() ? autograd::shape_text(targets) : "nothing",
                autograd::shape_text(ids) + " as ids");
  }
  autograd::check_targets(targets, config_.vocab_size);
  return loss_of_checked(ids, targets, on_device);
}

Tensor LanguageModel::loss_of_checked(const Tensor& ids, const Tensor& targets, const Tensor& cu_seqlens) const {
  return autograd::linear_cross_entropy(hidden_of(ids, cu_seqlens).flatten(0, 1), head(), targets.flatten());
}

bool LanguageModel::waits_for_gpu() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->waits_for_gpu(); });
}

void LanguageModel::check_state(const LanguageModelState& state, std::int64_t batch) const {
  if (state.batch != batch || state.layers.size() != layers_.size()) {
    throw Error(
        kName, "state",
        "one of " + std::to_string(state.batch) + " sequences and " + std::to_string(state.layers.size()) + " layers",
        std::to_string(batch) + " sequences and " + std::to_string(layers_.size()) + " layers");
  }
}

LanguageModelState LanguageModel::initial_state(std::int64_t batch) const {
  if (batch < 1) throw Error(kName, "batch", std::to_string(batch), "at least one sequence");
  LanguageModelState state;
  state.batch = batch;
  for (const auto& layer : layers_) {
    if (const auto* mixer = std::get_if<std::shared_ptr<Mixer>>(&layer->mixer)) {
      state.layers.emplace_back((*mixer)->initial_state(batch));
    } else if (const auto* rwkv7 = std::get_if<std::shared_ptr<Rwkv7Mixer>>(&layer->mixer)) {
      state.layers.emplace_back((*rwkv7)->initial_state(batch));
    } else {
      state.layers.emplace_back(std::get<std::shared_ptr<Attention>>(layer->mixer)->initial_cache(batch));
    }
  }
  return state;
}

Tensor LanguageModel::mix(std::size_t index, const Tensor& normed, LanguageModelState& state) const {
  const auto& own = layers_[index]->mixer;
  auto& memory = state.layers[index];
  if (const auto* mixer = std::get_if<std::shared_ptr<Mixer>>(&own)) {
    return (*mixer)->forward(normed, std::get<MixerState>(memory));
  }
  if (const auto* rwkv7 = std::get_if<std::shared_ptr<Rwkv7Mixer>>(&own)) {
    return (*rwkv7)->forward(normed, std::get<MixerState>(memory), state.first_values);
  }
  return std::get<std::shared_ptr<Attention>>(own)->forward(normed, std::get<KeyValueCache>(memory));
}

Tensor LanguageModel::stack_output(const Tensor& ids,
                                   const std::function<Tensor(std::size_t, const Tensor&)>& mix) const {
  Stream stream{autograd::embedding(embeddings_->value, ids), {}};
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    stream = layers_[i]->forward(stream, [&](const Tensor& normed) { return mix(i, normed); });
  }
  return add_and_norm(stream, *norm_, config_.norm_eps).second;
}

Tensor LanguageModel::logits_of(const Tensor& hidden) const {
  return autograd::linear(hidden, head()).to(torch::kFloat);
}

Tensor LanguageModel::advance(const Tensor& ids, LanguageModelState& state) const {
  const Tensor x = stack_output(ids, [&](std::size_t i, const Tensor& normed) { return mix(i, normed, state); });
  state.tokens += ids.size(1);
  state.first_values.reset();
  return x;
}

Tensor LanguageModel::advance_packed(const Tensor& ids, const Tensor& cu_seqlens, LanguageModelState& state) const {
  if (config_.has_attention()) throw Error(kName, "cu_seqlens", "a layer of softmax attention", "a mixer in each");
  const PackedWindows windows(cu_seqlens, ids.size(1), config_.mixer_config().conv);
  const Tensor x = stack_output(ids, [&](std::size_t i, const Tensor& normed) {
    auto& memory = std::get<MixerState>(state.layers[i]);
    if (const auto* rwkv7 = std::get_if<std::shared_ptr<Rwkv7Mixer>>(&layers_[i]->mixer)) {
      return (*rwkv7)->forward(normed, windows, memory, state.first_values);
    }
    return std::get<std::shared_ptr<Mixer>>(layers_[i]->mixer)->forward(normed, windows, memory);
  });
  state.first_values.reset();
  return x;
}

Tensor LanguageModel::prefill(const Tensor& ids, LanguageModelState& state) const {
  const torch::NoGradGuard no_grad;
  check_ids(ids, 2);
  check_state(state, ids.size(0));
  if (state.starts.defined())
    throw Error(kName, "state", "a joined one with softmax attention", "one that is not joined");
  const Tensor on_device = ids.to(embeddings_->value.device());
  const std::int64_t most = on_device.is_cuda() ? kPrefillTokensOnGpu : kPrefillTokens;
  // A multiple of the operator's chunk, so that the result does not depend on where a prefill is cut.
  const std::int64_t step = std::max(kChunk, most / ids.size(0) / kChunk * kChunk);
  Tensor last;
  for (std::int64_t begin = 0; begin < ids.size(1); begin += step) {
    last = advance(on_device.slice(1, begin, std::min(begin + step, ids.size(1))), state).select(1, -1);
  }
  return logits_of(last);
}

Tensor LanguageModel::step(const Tensor& ids, LanguageModelState& state) const {
  check_ids(ids, 1);
  return prefill(ids.unsqueeze(1), state);
}

}  // namespace efla::nn
