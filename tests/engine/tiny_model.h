// Small language models with random weights.
#pragma once

#include <cstdint>
#include <string>

#include "efla/nn/models/language_model.h"

namespace efla::test {

// Over bytes, of three layers of 32. Weights large enough that tokens differ much in probability. hybrid: the layer in
// the middle is softmax attention.
inline nn::LanguageModel tiny_model(std::uint64_t seed = 1, bool hybrid = false) {
  nn::LanguageModelConfig config;
  config.vocab_size = 258;
  config.hidden_size = 32;
  config.num_hidden_layers = 3;
  config.num_heads = 2;
  config.intermediate_size = 32;
  config.initializer_range = 0.3;
  config.bos_token_id = 256;
  config.eos_token_id = {257};
  if (hybrid) config.attention_layers = {1};
  return nn::LanguageModel(config, nn::Initialiser(seed));
}

// Returns a model that mostly draws the last token again: its layers add nothing, although their states change.
inline nn::LanguageModel repeating_model() {
  auto model = tiny_model();
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : model.named_parameters()) {
    const std::string& name = parameter.key();
    if (name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight")) torch::Tensor(parameter.value()).zero_();
  }
  return model;
}

}  // namespace efla::test
