// The layers of softmax attention of a model of a family, on the CPU. Keys and values lie in pages, which texts share
// where one was copied from the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/nn/families/family_config.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/inference/rows.h"
#include "efla/nn/inference/text_run.h"
#include "efla/rule/attention.h"

namespace efla::nn {

// The keys and values of texts, in float32. A page has a block of tokens, and for each layer the keys [G, K, P] and
// then the values [G, P, K] of rule/attention.h.
class TextPages {
 public:
  TextPages(const AttentionShape& shape, std::int64_t layers) : shape_(shape), layers_(layers) {}

  std::size_t page_bytes() const { return static_cast<std::size_t>(page_floats()) * sizeof(float); }
  // Returns the floats of the keys of a token in a layer, and of the values.
  std::int64_t token_floats() const { return shape_.key_value_heads * shape_.key_dim; }

  void make_slots(std::int64_t slots) { texts_.resize(static_cast<std::size_t>(slots)); }
  // Frees the pages of a text.
  void clear(std::int64_t slot) { text(slot).clear(); }
  // Lets a text share all pages of another one.
  void copy(std::int64_t from, std::int64_t to) { text(to) = text(from); }
  // Gives a text pages for the tokens from `begin` to `end`, which it shares with no other text.
  void own(std::int64_t slot, std::int64_t begin, std::int64_t end);

  // Return the pages of a text's keys and values in a layer.
  std::vector<float*> keys(std::int64_t slot, std::int64_t layer) const;
  std::vector<float*> values(std::int64_t slot, std::int64_t layer) const;
  // Copy the keys [tokens, G, K] and values of a text's first tokens in every layer, layer after layer, to `state` or
  // from it.
  void read(std::int64_t slot, std::int64_t tokens, std::span<float> state) const;
  void write(std::int64_t slot, std::int64_t tokens, std::span<const float> state);

 private:
  using Text = std::vector<std::shared_ptr<float[]>>;

  Text& text(std::int64_t slot) { return texts_[static_cast<std::size_t>(slot)]; }
  const Text& text(std::int64_t slot) const { return texts_[static_cast<std::size_t>(slot)]; }
  std::int64_t layer_floats() const { return shape_.key_page_elements() + shape_.value_page_elements(); }
  std::int64_t page_floats() const { return layers_ * layer_floats(); }
  template <class F>
  void for_each(std::int64_t slot, std::int64_t tokens, F&& f) const;

  AttentionShape shape_;
  std::int64_t layers_;
  std::vector<Text> texts_;
};

// Attention with norms of queries and keys, rope of a part of each head, and in some families a gate of the output:
//
//   o_proj (softmax(q kᵀ/√K) v ⊙ σ(gate))
class AttentionLayers {
 public:
  struct Layer {
    Vector q_norm, k_norm;  // of a head, or of all heads
    PackedWeight in;        // of q, which may have gates, k and v
    PackedWeight o_proj;
  };

  explicit AttentionLayers(const FamilyConfig& config);

  void add(Layer layer) { layers_.push_back(std::move(layer)); }
  std::size_t weight_bytes() const;
  TextPages& pages() { return pages_; }
  const TextPages& pages() const { return pages_; }

  // Begins a call with the runs of InferenceModel::advance: finds the position of each token, and gives the texts
  // pages.
  void begin(std::span<const TextRun> runs);
  // Maps the inputs x [R, D] of layer number `layer` of these to its outputs y [R, D], which may be x.
  void attend(std::int64_t layer, const View<float, 2>& x, const View<float, 2>& y, std::span<const TextRun> runs,
              ThreadPool& pool);

 private:
  void split(const View<float, 2>& projected);
  void rotate(const View<float, 2>& rows, std::int64_t heads, ThreadPool& pool);

  const Family& family_;
  AttentionShape shape_;
  std::int64_t rotary_;
  double rope_theta_, norm_eps_;
  std::vector<Layer> layers_;
  TextPages pages_;

  std::vector<std::int64_t> positions_;  // of the call's tokens
  RowBuffer projected_, q_, k_, gate_, o_;
};

}  // namespace efla::nn
