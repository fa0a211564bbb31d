// The layers of softmax attention of a model of a family, on the CPU. Keys and values lie in pages, which texts share
// where one was copied from the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/base/threads.h"
#include "efla/base/view.h"
#include "efla/nn/families/family_config.h"
#include "efla/nn/families/family_tensors.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/inference/rows.h"
#include "efla/nn/inference/text_run.h"
#include "efla/rule/attention.h"

namespace efla::nn {

// Return the type with a name, "float32" or "bfloat16", and the name of a type. parse_kv_cache_type throws Error for
// another name.
KeyValueType parse_kv_cache_type(const std::string& name);
std::string_view name_of(KeyValueType type);

// The keys and values of the texts in slots. A page has a block of tokens, and for each layer the keys [G, K, P] and
// then the values [G, P, K] of rule/attention.h. A text shares its full pages and owns the one behind them.
class TextPages {
 public:
  TextPages(const AttentionShape& shape, std::int64_t layers, KeyValueType type)
      : shape_(shape), layers_(layers), type_(type) {}

  KeyValueType type() const { return type_; }
  std::size_t page_bytes() const { return static_cast<std::size_t>(layers_) * layer_bytes(); }
  void make_slots(std::int64_t slots) { texts_.resize(static_cast<std::size_t>(slots)); }
  // Frees the pages of a text.
  void clear(std::int64_t slot) { text(slot).clear(); }
  // Gives a text pages for this many tokens.
  void grow(std::int64_t slot, std::int64_t tokens);
  // Lets a text share the full pages of another one, of this many tokens, and copies the page behind them.
  void copy(std::int64_t from, std::int64_t to, std::int64_t tokens);
  // Returns the full pages of a text of this many tokens, and a copy of the one behind them.
  std::vector<Page> pages(std::int64_t slot, std::int64_t tokens) const;
  // Sets a text of this many tokens: shares its full pages, and copies the one behind them.
  void set(std::int64_t slot, std::int64_t tokens, std::span<const Page> pages);

  // Return the pages of a text's keys and values in a layer. S is the type's.
  template <class S>
  std::vector<S*> keys(std::int64_t slot, std::int64_t layer) const;
  template <class S>
  std::vector<S*> values(std::int64_t slot, std::int64_t layer) const;

 private:
  using Text = std::vector<std::shared_ptr<PageBytes>>;

  Text& text(std::int64_t slot) { return texts_[static_cast<std::size_t>(slot)]; }
  const Text& text(std::int64_t slot) const { return texts_[static_cast<std::size_t>(slot)]; }
  std::size_t number_bytes() const { return type_ == KeyValueType::float32 ? sizeof(float) : sizeof(bfloat16); }
  std::size_t layer_bytes() const {
    return number_bytes() * static_cast<std::size_t>(shape_.key_page_elements() + shape_.value_page_elements());
  }
  std::int64_t pages_for(std::int64_t tokens) const { return layers_ == 0 ? 0 : shape_.pages_for(tokens); }
  // Returns whether the last page of a text of this many tokens is not full.
  bool is_open(std::int64_t tokens) const { return layers_ > 0 && tokens % shape_.page_tokens > 0; }
  Text shared(std::int64_t slot, std::int64_t tokens) const;
  std::shared_ptr<PageBytes> copy_of(const PageBytes& page, std::int64_t tokens) const;

  AttentionShape shape_;
  std::int64_t layers_;
  KeyValueType type_;
  std::vector<Text> texts_;
};

// Attention with norms of queries and keys, rope of a part of each head, and in some families a gate of the output:
//
//   o_proj (softmax(q kᵀ/√K) v ⊙ σ(gate))
class AttentionLayers {
 public:
  // layers: how many add() will add.
  AttentionLayers(const FamilyConfig& config, std::int64_t layers, KeyValueType type);

  // Adds a layer and returns its number.
  std::int64_t add(const AttentionTensors& tensors, WeightType weights);
  std::size_t weight_bytes() const;
  TextPages& pages() { return pages_; }
  const TextPages& pages() const { return pages_; }

  // Begins a call with the runs of InferenceModel::advance: finds the position of each token, and gives the texts
  // pages.
  void begin(std::span<const TextRun> runs);
  // Maps the inputs x [R, D] of layer number `layer` of these to its outputs y [R, D], which may be x. first_key:
  // tokens of a text that no later token uses.
  void attend(std::int64_t layer, const View<float, 2>& x, const View<float, 2>& y, std::span<const TextRun> runs,
              ThreadPool& pool, std::int64_t first_key = 0);

 private:
  struct Layer {
    Vector q_norm, k_norm;  // of a head, or of all heads
    PackedWeight in;        // of q, which may have gates, k and v
    PackedWeight o_proj;
  };

  void split(const View<float, 2>& projected);
  void rotate(const View<float, 2>& rows, std::int64_t heads, ThreadPool& pool);
  template <class S>
  void attend_pages(std::int64_t layer, AttentionForward<S> problem, std::span<const TextRun> runs, ThreadPool& pool);

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
