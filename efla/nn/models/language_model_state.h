// What a language model keeps of the tokens so far: of constant size, but for layers of softmax attention.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "efla/io/safetensors.h"
#include "efla/nn/layers/attention.h"
#include "efla/nn/layers/mixer.h"

namespace efla::nn {

// A copy shares its tensors with the original, which decoding overwrites; clone does not.
struct LanguageModelState {
  std::int64_t batch = 0;   // B sequences side by side
  std::int64_t tokens = 0;  // that each has seen
  std::vector<std::variant<MixerState, KeyValueCache>> layers;

  // A state of its own with the same values.
  LanguageModelState clone() const;

  std::int64_t bytes() const;

  // layers.I.memory [B, HV, K, V], layers.I.conv [B, W − 1, 2·H·K + HV·V], or layers.I.keys and layers.I.values
  // [B, HKV, tokens, D/H]; contiguous.
  std::vector<std::pair<std::string, torch::Tensor>> tensors() const;

  // Reads tensors() after so many tokens from a file into this state, which a model has made for as many sequences.
  // Throws IoError(content) where one is missing or of another shape.
  void read(const io::SafetensorsFile& file, std::int64_t tokens);
};

}  // namespace efla::nn
