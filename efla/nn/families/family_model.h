// A language model of a family (family.h) on the CPU. As with InferenceModel, the tokens of many texts go through the
// layers in one call. A text's state has a constant part, in a slot, and pages of keys and values that grow with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "efla/nn/families/attention_layers.h"
#include "efla/nn/families/draft_head.h"
#include "efla/nn/families/experts.h"
#include "efla/nn/families/family_config.h"
#include "efla/nn/families/family_tensors.h"
#include "efla/nn/inference/delta_mixers.h"

namespace efla::nn {

// Arithmetic is in float32. A token's outputs have the same bits for any other tokens in the call, any cuts of a prompt
// at multiples of kCutTokens and any number of threads. Only one thread may use the object at a time.
class FamilyModel {
 public:
  // Loads the model of a folder. With WeightType::float32 each matrix stays in its mapped file, in the file's type,
  // except that float16 is widened. With bfloat16, int8 and int4 the matrices of linear layers are rounded to this type
  // where the file's type has more bits; the projections of step sizes and decays are not. Throws IoError for a folder
  // that is not a model of a family, or not a whole one. draft_head: loads the head for drafts too, and throws Error
  // where the folder has none.
  FamilyModel(const std::filesystem::path& folder, WeightType weights,
              KeyValueType kv_cache_type = KeyValueType::float32, bool draft_head = false);
  FamilyModel(const FamilyModel&) = delete;
  FamilyModel& operator=(const FamilyModel&) = delete;

  const FamilyConfig& config() const { return config_; }
  std::int64_t parameters() const { return parameters_; }
  std::int64_t skipped_tensors() const { return skipped_; }
  std::size_t weight_bytes() const;
  // Returns the SHA-256 of configuration and tensors.
  std::string fingerprint() const { return tensors_.fingerprint(); }

  std::size_t constant_bytes() const;                                         // of a text
  std::size_t page_bytes() const { return attention_.pages().page_bytes(); }  // of kAttentionBlock tokens
  KeyValueType kv_cache_type() const { return attention_.pages().type(); }
  std::vector<StatePart> state_parts() const;  // of TextState::constant

  // Makes the slots, once, before the functions that follow.
  void make_slots(std::int64_t slots);
  // Set the state in a slot: to the state of an empty text, to `state`, to another slot's, which has seen this many
  // tokens.
  void clear(std::int64_t slot);
  void set(std::int64_t slot, const TextState& state);
  void copy(std::int64_t from, std::int64_t to, std::int64_t tokens);
  // Frees the pages of a slot.
  void drop(std::int64_t slot) { attention_.pages().clear(slot); }
  // Returns the state in a slot, which has seen this many tokens.
  TextState state(std::int64_t slot, std::int64_t tokens);

  // Do what InferenceModel's functions do.
  void advance(std::span<const std::int32_t> ids, std::span<const TextRun> runs, const View<float, 2>& hidden,
               ThreadPool& pool, std::vector<Draft>* drafts = nullptr);
  void accept(const Draft& draft, std::int64_t tokens, ThreadPool& pool);
  // Does what DraftHead::draft does, for a model with such a head.
  std::vector<std::int32_t> draft(std::int64_t slot, std::int64_t tokens, std::int32_t id, std::int64_t most,
                                  ThreadPool& pool) {
    return draft_head_->draft(slot, tokens, id, most, pool);
  }
  void logits(const View<const float, 2>& hidden, const View<float, 2>& logits, ThreadPool& pool) const;

 private:
  struct Layer {
    bool attends = false;
    std::int64_t index = 0;                                   // among the layers of the same kind
    Vector before_mixer, after_mixer, before_mlp, after_mlp;  // norms; empty: none
    LayerMlp mlp;
  };

  void add_layer(const LayerTensors& from, WeightType weights);
  std::int64_t add_mixer(const MixerTensors& from, WeightType weights);

  FamilyConfig config_;
  DeltaMixers mixers_;
  AttentionLayers attention_;
  FamilyTensors tensors_;
  std::vector<Layer> layers_;
  std::vector<float> norm_;
  PackedWeight embeddings_;  // without outputs if the head has the same weight
  PackedWeight head_;
  std::optional<DraftHead> draft_head_;
  std::int64_t parameters_ = 0, skipped_ = 0;

  std::optional<StatePool> states_;
  RowBuffer x_, normed_;
  MlpRows rows_;
};

}  // namespace efla::nn
