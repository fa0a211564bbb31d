#include "efla/nn/models/pixel_classifier.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "efla/base/check.h"
#include "efla/base/memory.h"
#include "efla/io/fields.h"

namespace efla::nn {
namespace {

using nlohmann::json;

constexpr const char* kClassifier = "pixel classifier";
constexpr std::int64_t kMaxClassifierLayers = 64, kMaxTokens = 1 << 20, kMaxClasses = 1 << 16;
constexpr double kMaxMlpRatio = 64.0, kClassifierNormEps = 1e-6;

// Small compared with a pixel's contribution to a token's vector.
constexpr double kPositionDeviation = 0.02;

}  // namespace

std::int64_t PixelClassifierConfig::mlp_width() const {
  return mlp_ratio > 0.0 ? std::max<std::int64_t>(1, std::llround(mlp_ratio * static_cast<double>(hidden))) : 0;
}

double PixelClassifierConfig::least_parameters() const {
  const auto width = static_cast<double>(hidden);
  return static_cast<double>(layers) * width * (4.0 * width + 3.0 * static_cast<double>(mlp_width()));
}

void validate(const PixelClassifierConfig& config) {
  validate(config.mixer_config());
  const Require require(kClassifier);
  require.count("layers", config.layers, kMaxClassifierLayers);
  require.count("tokens", config.tokens, kMaxTokens);
  require.count("classes", config.classes, kMaxClasses);
  require(config.mlp_ratio >= 0.0 && config.mlp_ratio <= kMaxMlpRatio, "mlp_ratio", config.mlp_ratio,
          "0 (no MLP) to " + value_text(kMaxMlpRatio));
  require(config.pooling == "mean" || config.pooling == "last", "pooling", "'" + config.pooling + "'", "mean or last");
}

json to_json(const PixelClassifierConfig& c) {
  return {{"mixer", c.mixer},         {"layers", c.layers}, {"hidden", c.hidden},       {"heads", c.heads},
          {"mlp_ratio", c.mlp_ratio}, {"conv", c.conv},     {"positions", c.positions}, {"output_norm", c.output_norm},
          {"pooling", c.pooling},     {"tokens", c.tokens}, {"classes", c.classes}};
}

PixelClassifierConfig pixel_classifier_config_from_json(const json& json) {
  const io::Fields fields(json, io::refuse_argument(kClassifier));
  PixelClassifierConfig c;
  fields.get_to("mixer", c.mixer);
  fields.get_to("layers", c.layers);
  fields.get_to("hidden", c.hidden);
  fields.get_to("heads", c.heads);
  fields.get_to("mlp_ratio", c.mlp_ratio);
  fields.get_to("conv", c.conv);
  fields.get_to("positions", c.positions);
  fields.get_to("output_norm", c.output_norm);
  fields.get_to("pooling", c.pooling);
  fields.get_to("tokens", c.tokens);
  fields.get_to("classes", c.classes);
  fields.refuse_others();
  return c;
}

PixelClassifier::PixelClassifier(const PixelClassifierConfig& config, std::uint64_t seed) : config_(config) {
  validate(config);
  const std::int64_t width = config.hidden;
  require_memory(kClassifier, "sizes hidden, layers", "parameters", sizeof(float) * config.least_parameters());
  const Initialiser init(seed);
  embedding_ = register_parameter("embedding", init.uniform("embedding", {1, width}, 1.0));
  if (config.positions) {
    positions_ = register_parameter("positions", init.normal("positions", {config.tokens, width}, kPositionDeviation));
  }
  bias_ = register_parameter("embedding_bias", init.uniform("embedding_bias", {width}, 1.0));

  const auto stack = register_module("layers", std::make_shared<torch::nn::Module>());
  const BlockConfig block{
      .mixer = config.mixer_config(), .mlp_width = config.mlp_width(), .norm_eps = kClassifierNormEps};
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const auto name = std::to_string(i);
    const auto part = init.within("layers").within(name);
    layers_.push_back(stack->register_module(name, std::make_shared<Block>(block, part)));
  }
  norm_ = add_norm(*this, "norm", width);
  head_ = register_module("head", std::make_shared<Weight>(linear_weight(init.within("head"), config.classes, width)));
  head_bias_ = register_parameter("head_bias", torch::zeros({config.classes}));
}

torch::Tensor PixelClassifier::forward(const torch::Tensor& pixels) const {
  // A matrix product: its gradient with respect to the embedding is also one and needs no large temporary.
  auto x = torch::matmul(pixels.unsqueeze(-1), embedding_);  // [B, T, D]
  x = x + (positions_.defined() ? positions_ + bias_ : bias_);
  Stream stream{x, {}};
  for (const auto& layer : layers_) stream = layer->forward(stream);
  x = add_and_norm(stream, *norm_, kClassifierNormEps).second;
  const auto pooled = config_.pooling == "mean" ? x.mean(1) : x.select(1, x.size(1) - 1);  // [B, D]
  return torch::addmm(head_bias_, pooled, head_->value.t());
}

}  // namespace efla::nn
