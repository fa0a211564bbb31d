// What a language model keeps of the tokens so far: of constant size, but for layers of softmax attention.
#pragma once

#include <cstdint>
#include <filesystem>
#include <variant>
#include <vector>

#include "efla/nn/layers/attention.h"
#include "efla/nn/layers/mixer.h"

namespace efla::nn {

struct LanguageModelState {
  std::int64_t batch = 0;   // B sequences side by side
  std::int64_t tokens = 0;  // that each has seen
  std::vector<std::variant<MixerState, KeyValueCache>> layers;

  // A state of its own with the same values.
  LanguageModelState clone() const;

  std::int64_t bytes() const;

  // One safetensors file: layers.I.memory [B, HV, K, V], layers.I.conv [B, W − 1, 2·H·K + HV·V] or layers.I.keys and
  // layers.I.values [B, HKV, tokens, D/H]. Throws IoError; the file is whole or as before.
  void save(const std::filesystem::path& path) const;

  // Reads a file of save into this state, which a model has made for the sequences that the file holds. Throws IoError
  // for another file, or one of a model with other sizes.
  void load(const std::filesystem::path& path);
};

}  // namespace efla::nn
