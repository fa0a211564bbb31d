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
#include "efla/nn/inference/layer_parameters.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/models/language_model.h"
#include "efla/rule/problem.h"

namespace efla::nn {

// A prompt may be cut into several runs at multiples of this many tokens of the text, with the same bits.
inline constexpr std::int64_t kCutTokens = 64;

// Tokens of a text that can be decoded together.
inline constexpr std::int64_t kMostDecoded = kMaxStepTokens;

// Tokens of one text that follow one another.
struct TextRun {
  std::int64_t slot = 0;   // slot of the pool; no other run of the call has this slot
  std::int64_t begin = 0;  // tokens of the text before the run
  std::int64_t tokens = 1;
  bool decode = false;  // true: computed like decode steps; one token, or a draft of up to kMostDecoded tokens
};

// A run of several decoded tokens, and the inputs of its recurrence in every layer, layer after layer.
struct Draft {
  TextRun run;
  std::vector<float> window, mixed;  // [layers, W − 1 + tokens, channels], inputs and outputs of the convolution
  std::vector<float> beta, decay;    // [layers, tokens, HV], [layers, tokens, HV or HV·K]
};

// The states of texts: one slot per text, of the same size for any length of the text.
class StatePool {
 public:
  StatePool(std::int64_t slots, std::size_t slot_floats);

  std::int64_t slots() const { return slots_; }
  std::span<float> slot(std::int64_t index) { return {data_.get() + index * slot_floats_, slot_floats_}; }

 private:
  std::int64_t slots_;
  std::size_t slot_floats_;
  std::unique_ptr<float[]> data_;
};

// A part of a slot, with the name and the shape of the same tensor of LanguageModelState::tensors(), and its place in
// floats.
struct StatePart {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t offset, floats;
};

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
  ~InferenceModel();

  const LanguageModelConfig& config() const { return config_; }
  std::size_t weight_bytes() const;
  std::size_t state_floats() const { return state_floats_; }
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
  struct Layer;
  struct Buffers;

  static Layer packed(const LayerParameters& from, WeightType weights);
  void mix(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool);
  void convolve(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool);
  void compute_gates(const Layer& layer, ThreadPool& pool);
  void recur(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool);
  void recur_prompt(const TextRun& run, std::int64_t row, const float* qkv, std::span<float> memory, ThreadPool& pool);
  void keep_draft(Draft& draft, std::int64_t row, std::int64_t at);
  void recur_draft(const Draft& draft, std::int64_t layer, std::int64_t tokens, std::span<float> memory, float* o,
                   ThreadPool& pool);

  LanguageModelConfig config_;
  MixerPlan plan_;
  std::int64_t memory_floats_, layer_floats_;
  std::size_t state_floats_;
  std::vector<float> norm_;
  torch::Tensor embeddings_;  // [vocab_size, D]; undefined if the head has the same weight
  PackedWeight head_;
  std::vector<Layer> layers_;
  std::unique_ptr<Buffers> buffers_;
};

// Rounds the weights of a model to the values with which an InferenceModel with weights of this type computes.
void round_weights(LanguageModel& model, WeightType weights);

}  // namespace efla::nn
