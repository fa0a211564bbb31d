// A language model's state after the tokens so far: of constant size, except for layers of softmax attention.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "efla/nn/layers/attention.h"
#include "efla/nn/layers/mixer.h"

namespace efla::nn {

// Data that a decoder keeps with a state for the state's next step.
struct DecodeCache {
  virtual ~DecodeCache() = default;
};

// A copy shares its tensors with the original, and decoding overwrites them. Use clone for an independent copy.
struct LanguageModelState {
  std::int64_t batch = 0;   // B sequences
  std::int64_t tokens = 0;  // tokens per sequence so far; of the longest sequence in a joined state
  std::vector<std::variant<MixerState, KeyValueCache>> layers;
  torch::Tensor first_values = {};  // of the call in progress: what its layers of rwkv7 read of the first one
  torch::Tensor starts = {};  // [B] int64: slots of the first tokens in a joined state's caches of keys and values
  std::shared_ptr<DecodeCache> decode = {};  // what GpuDecoder keeps for these tensors

  // Returns an independent state with the same values.
  LanguageModelState clone() const;

  // Return independent states: all sequences of the states one after the other, and the sequences of the given rows.
  // None of the states to be joined may be a joined one. Only GpuDecoder takes a joined state of a model with softmax
  // attention, and only for steps.
  static LanguageModelState joined(const std::vector<const LanguageModelState*>& states);
  LanguageModelState selected(const std::vector<std::int64_t>& rows) const;
  // Returns an independent state of sequence `index`, which has row_tokens tokens.
  LanguageModelState row(std::int64_t index, std::int64_t row_tokens) const;

  // Returns the size of all tensors.
  std::int64_t bytes() const;

  // Returns layers.I.memory [B, HV, K, V] and layers.I.conv [B, W − 1, 2·H·K + HV·V], or layers.I.keys and
  // layers.I.values [B, HKV, tokens, D/H]; all contiguous, in the CPU's memory.
  std::vector<std::pair<std::string, torch::Tensor>> tensors() const;

  // Sets this state, which a model has made, to a state after read_tokens tokens. tensor: is called for each of
  // tensors(), in this order, with name and shape; returns a new tensor.
  using Reader = std::function<torch::Tensor(const std::string& name, at::IntArrayRef shape)>;
  void read(const Reader& tensor, std::int64_t read_tokens);
};

}  // namespace efla::nn
