#include "efla/nn/models/sequence_model.h"

#include <torch/types.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "efla/autograd/layers/lookup.h"
#include "efla/autograd/layers/rms_norm.h"
#include "efla/base/check.h"
#include "efla/base/error.h"
#include "efla/base/memory.h"

namespace efla::nn {
namespace {

using torch::Tensor;

constexpr const char* kSequenceModel = "sequence model";
constexpr double kSequenceNormEps = 1e-5, kEmbeddingDeviation = 0.02;
constexpr std::int64_t kDecoderLayers = 2;

Tensor normed(const Tensor& x, const Weight& weight) { return autograd::rms_norm(x, weight.value, kSequenceNormEps); }

// Returns sin and cos of t · 10000^(−i / (D/2 − 1)), i = 0 …: [T, D].
Tensor sine_positions(std::int64_t tokens, std::int64_t width, const torch::Device& device) {
  const std::int64_t half = width / 2;
  const auto options = torch::TensorOptions(torch::kFloat).device(device);
  const auto i = torch::arange(half, options) / static_cast<double>(std::max<std::int64_t>(half - 1, 1));
  const auto angle = torch::arange(tokens, options).unsqueeze(1) * torch::exp(-std::log(10000.0) * i);
  return torch::cat({angle.sin(), angle.cos()}, 1);
}

void require_room_for(const SequenceModelConfig& config) {
  require_memory(kSequenceModel, "sizes vocab, hidden, layers", "parameters",
                 sizeof(float) * config.least_parameters());
}

}  // namespace

MixerConfig SequenceModelConfig::mixer_config() const {
  MixerConfig config{.mixer = mixer, .hidden = hidden, .heads = heads};
  config.key_dim = config.value_dim = head_dim;
  config.steps_per_token = steps_per_token;
  const MixerPreset& preset = mixer_preset(mixer);
  if (preset.gate != Gate::none) config.output_gate = output_gate_of(preset);
  config.norm_eps = kSequenceNormEps;
  return config;
}

double SequenceModelConfig::least_parameters() const {
  const auto width = static_cast<double>(hidden);
  const auto projected = static_cast<double>(head_dim > 0 ? heads * head_dim : hidden);
  const double columns = 4.0 * projected + 3.0 * static_cast<double>(inner());
  return width * (2.0 * static_cast<double>(vocab) + static_cast<double>(layers) * columns);
}

void validate(const SequenceModelConfig& config) {
  const Require require(kSequenceModel);
  require.count("vocab", config.vocab, std::int64_t{1} << 24);
  require.count("hidden", config.hidden, 1 << 14);
  require.count("layers", config.layers, 64);
  require.count("heads", config.heads, config.hidden);
  validate(config.mixer_config());
  if (config.reconstructs && config.hidden % 2 != 0) {
    throw Error(kSequenceModel, "hidden", std::to_string(config.hidden),
                "an even number, for sines and cosines of positions");
  }
}

nlohmann::json to_json(const SequenceModelConfig& c) {
  nlohmann::json out{{"mixer", c.mixer},
                     {"vocab", c.vocab},
                     {"hidden", c.hidden},
                     {"layers", c.layers},
                     {"heads", c.heads},
                     {"head_dim", c.head_dim},
                     {"reconstructs", c.reconstructs}};
  if (c.steps_per_token > 0) out["steps_per_token"] = c.steps_per_token;
  return out;
}

SequenceModel::SequenceModel(const SequenceModelConfig& config, const Initialiser& init)
    : config_((validate(config), require_room_for(config), config)) {
  const auto embedding = init.within("embeddings").normal("weight", {config.vocab, config.hidden}, kEmbeddingDeviation);
  embeddings_ = register_module("embeddings", std::make_shared<Weight>(embedding));
  const BlockConfig block{.mixer = config.mixer_config(), .mlp_width = config.inner(), .norm_eps = kSequenceNormEps};
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const auto name = "layer" + std::to_string(i);
    layers_.push_back(register_module(name, std::make_shared<Block>(block, init.within(name))));
  }
  for (std::int64_t i = 0; config.reconstructs && i < kDecoderLayers; ++i) {
    add_decoder_layer("decoder" + std::to_string(i), init);
  }
  norm_ = add_norm(*this, "norm", config.hidden);
  head_ = register_module("head",
                          std::make_shared<Weight>(linear_weight(init.within("head"), config.vocab, config.hidden)));
  head_bias_ = head_->register_parameter("bias", torch::zeros({config.vocab}));
}

void SequenceModel::add_decoder_layer(const std::string& name, const Initialiser& init) {
  const auto module = register_module(name, std::make_shared<torch::nn::Module>());
  DecoderLayer layer;
  layer.norm = add_norm(*module, "norm", config_.hidden);
  const auto weight = linear_weight(init.within(name).within("linear"), config_.hidden, config_.hidden);
  layer.linear = module->register_module("linear", std::make_shared<Weight>(weight));
  layer.bias = layer.linear->register_parameter("bias", torch::zeros({config_.hidden}));
  decoder_.push_back(std::move(layer));
}

Tensor SequenceModel::decoded(const Tensor& x, const Tensor& places) const {
  const std::int64_t tokens = x.size(1);
  const auto sequence = torch::div(places, tokens, "floor"), position = torch::remainder(places, tokens);
  const auto positions = sine_positions(tokens, config_.hidden, x.device());
  auto y = x.select(1, tokens - 1).index_select(0, sequence) + positions.index_select(0, position);
  for (const auto& layer : decoder_) {
    y = torch::gelu(torch::addmm(layer.bias, normed(y, *layer.norm), layer.linear->value.t()));
  }
  return y;
}

Tensor SequenceModel::logits(const Tensor& ids, const Tensor& places) const {
  Stream stream{autograd::embedding(embeddings_->value, ids), {}};
  for (const auto& layer : layers_) stream = layer->forward(stream);
  const auto read =
      config_.reconstructs
          ? normed(decoded(stream.x + stream.branch, places), *norm_)
          : autograd::rows_at(add_and_norm(stream, *norm_, kSequenceNormEps).second.flatten(0, 1), places);
  return torch::addmm(head_bias_, read, head_->value.t()).to(torch::kFloat);
}

}  // namespace efla::nn
