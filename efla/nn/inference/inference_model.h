// A language model for inference on the CPU. The tokens of many texts, each with its own state, go through the layers
// in one call, so that every weight is read once for all texts. docs/generation.md describes generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/nn/inference/delta_mixers.h"
#include "efla/nn/inference/layer_parameters.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/inference/text_run.h"
#include "efla/nn/models/language_model.h"

namespace efla::nn {

// Outputs agree with LanguageModel but for rounding. A token's outputs have the same bits for any other tokens in the
// call and for any number of threads. Only one thread may use the object at a time.
class InferenceModel {
 public:
  // Returns the property of a model that this class does not support, or "".
  static std::string refusal(const LanguageModelConfig& config);

  // Takes the weights of a model on the CPU; float32 weights share the model's memory. Throws Error if refusal returns
  // a reason: layers of softmax attention, or a mixer without short convolution, with another activation than silu, or
  // with qk_norm sum.
  InferenceModel(const LanguageModel& model, WeightType weights);

  const LanguageModelConfig& config() const { return config_; }
  std::size_t weight_bytes() const;
  std::size_t state_floats() const { return mixers_.state_floats(); }
  // Returns the parts of a slot, with the names and shapes of LanguageModelState::tensors().
  std::vector<StatePart> state_parts() const;

  // Copy the state of one text to a slot and from a slot. The number of tokens in `to` does not change.
  void copy_state(const LanguageModelState& from, std::span<float> slot) const;
  void copy_state(std::span<const float> slot, LanguageModelState& to) const;

  // Advances the texts of the runs by their tokens. `ids` has the tokens of all runs in their order, each in [0,
  // vocab_size). Runs of one decoded token come first, then drafts, then runs of prompts. Writes the inputs of the head
  // to hidden [number of ids, D]. The states of texts with a draft do not change; `drafts` gets one Draft each, for
  // accept. Throws Error for a draft without `drafts`.
  void advance(std::span<const std::int32_t> ids, std::span<const TextRun> runs, StatePool& states,
               const View<float, 2>& hidden, ThreadPool& pool, std::vector<Draft>* drafts = nullptr);

  // Advances the text of a draft by the draft's first `tokens` tokens, with the bits of `tokens` decode steps.
  void accept(const Draft& draft, std::int64_t tokens, StatePool& states, ThreadPool& pool);

  // Maps rows of hidden to logits [rows, vocab_size].
  void logits(const View<const float, 2>& hidden, const View<float, 2>& logits, ThreadPool& pool) const;

 private:
  struct Layer {
    Vector attn_norm, mlp_norm;
    PackedWeight gate_up, down;
  };

  void add_layer(const LayerParameters& from, WeightType weights);

  LanguageModelConfig config_;
  DeltaMixers mixers_;
  std::vector<float> norm_;
  torch::Tensor embeddings_;  // [vocab_size, D]; undefined if the head has the same weight
  PackedWeight head_;
  std::vector<Layer> layers_;
  RowBuffer x_, normed_, inner_, product_;
};

// Rounds the weights of a model to the values with which an InferenceModel with weights of this type computes.
void round_weights(LanguageModel& model, WeightType weights);

}  // namespace efla::nn
