// The head for drafts of a model of a family (mtp), on the CPU: a layer of attention that predicts the next token but
// one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "efla/nn/families/attention_layers.h"
#include "efla/nn/families/experts.h"
#include "efla/nn/families/family_config.h"
#include "efla/nn/families/family_tensors.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/inference/rows.h"
#include "efla/nn/inference/text_run.h"

namespace efla::nn {

// Predicts the token after an id from the id's embedding e and from h, which is the input of the model's output weight
// before this id, or the head's own result after an id that it has predicted:
//
//   x = fc [norm_e(e) | norm_h(h)];  x += attention(norm(x));  x += mlp(norm(x));  logits = output · norm(x)
//
// A text's first token has no h: zeros stand for it, and no other token attends to it. The keys and values of a token
// lie beside those of the model's layers, in the same place of the text's pages. Besides them a text's state has h
// before its next token.
class DraftHead {
 public:
  // attention: of the model, to which the head adds a layer. embeddings, output: the model's weights. All three must
  // outlive the object.
  DraftHead(const DraftHeadTensors& from, const FamilyConfig& config, AttentionLayers& attention,
            const PackedWeight& embeddings, const PackedWeight& output, WeightType weights);

  std::size_t bytes() const { return fc_.bytes() + mlp_.bytes(); }  // without the attention's
  std::int64_t width() const { return width_; }                     // of h

  void make_slots(std::int64_t slots) { hidden_.emplace(slots, static_cast<std::size_t>(width_)); }
  // Returns h [D] before the next token of the text in a slot.
  std::span<float> hidden(std::int64_t slot) { return hidden_->slot(slot); }

  // Reads the tokens of a call of FamilyModel::advance with the inputs `output` [R, D] of the model's output weight:
  // writes their keys and values, and keeps h in the slots, but that of drafts in `drafts`. The runs are those of the
  // last call of AttentionLayers::begin.
  void read(std::span<const std::int32_t> ids, std::span<const TextRun> runs, const View<float, 2>& output,
            std::vector<Draft>* drafts, ThreadPool& pool);
  // Keeps h after the first `tokens` tokens of a draft.
  void accept(const Draft& draft, std::int64_t tokens);
  // Returns the `most` likeliest tokens after `id`, each predicted from the ones before it. `id` follows the text in a
  // slot, of this many tokens, whose state does not change.
  std::vector<std::int32_t> draft(std::int64_t slot, std::int64_t tokens, std::int32_t id, std::int64_t most,
                                  ThreadPool& pool);

 private:
  void attend(std::span<const std::int32_t> ids, std::span<const TextRun> runs, const View<float, 2>& hidden,
              const View<float, 2>& x, ThreadPool& pool);

  std::int64_t width_, vocab_size_, layer_;  // layer_: number of the head's layer of attention
  double norm_eps_;
  AttentionLayers& attention_;
  const PackedWeight &embeddings_, &output_;
  Vector embedding_norm_, hidden_norm_, before_attention_, before_mlp_, norm_;
  PackedWeight fc_;
  LayerMlp mlp_;

  std::optional<StatePool> hidden_;
  RowBuffer before_, joined_, x_, normed_, logits_;
  MlpRows rows_;
};

}  // namespace efla::nn
