// A language model for inference on the CPU: the tokens of many texts, each with its own state, go through the layers
// in one call, and every weight is read once for all of them.
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
  std::int64_t slot = 0;   // of the pool, in which no other run of the call is
  std::int64_t begin = 0;  // tokens of the text before them
  std::int64_t tokens = 1;
  bool decode = false;  // with the arithmetic of decode steps: one token, or a draft of up to kMostDecoded
};

// A run of several decoded tokens, and what the layers computed of it before the recurrence, one after the other.
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

// A part of a slot, with the name and the shape of the tensor that LanguageModelState::tensors() has.
struct StatePart {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t offset, floats;
};

// Outputs agree with LanguageModel but for rounding. A token's outputs have the same bits whatever other tokens a call
// has and for any number of threads. Functions are not for several threads at once.
class InferenceModel {
 public:
  // Returns what it does not compute of a model, or "".
  static std::string refusal(const LanguageModelConfig& config);

  // Takes the weights of a model on the CPU; float32 weights share the model's memory. Throws Error naming what it does
  // not compute: layers of softmax attention, and mixers without short convolution or with other activations
  // than silu.
  InferenceModel(const LanguageModel& model, WeightType weights);
  ~InferenceModel();

  const LanguageModelConfig& config() const { return config_; }
  std::size_t weight_bytes() const;
  std::size_t state_floats() const { return state_floats_; }
  std::vector<StatePart> state_parts() const;

  // Copy the state of one text from and to a slot. The number of tokens stays as it is.
  void copy_state(const LanguageModelState& from, std::span<float> slot) const;
  void copy_state(std::span<const float> slot, LanguageModelState& to) const;

  // Advances the texts of the runs by their tokens: `ids` has the tokens of one run after the other, each in [0,
  // vocab_size). Runs with `decode` come first, of these the drafts last. Writes the inputs of the head to hidden [ids,
  // D]. The text of a draft stays as it is; `drafts` gets what accept needs of each.
  void advance(std::span<const std::int32_t> ids, std::span<const TextRun> runs, StatePool& states,
               const View<float, 2>& hidden, ThreadPool& pool, std::vector<Draft>* drafts = nullptr);

  // Advances the text of a draft by its first `tokens`, with the bits of that many decode steps.
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
  MixerShape mixer_;
  std::int64_t memory_floats_, layer_floats_;
  std::size_t state_floats_;
  std::vector<float> norm_;
  torch::Tensor embeddings_;  // [vocab_size, D]; undefined if they are the head's
  PackedWeight head_;
  std::vector<Layer> layers_;
  std::unique_ptr<Buffers> buffers_;
};

// Replaces the weights of a model by the values that an InferenceModel with such weights computes with.
void round_weights(LanguageModel& model, WeightType weights);

}  // namespace efla::nn
