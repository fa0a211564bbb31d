// The language model of section 5.2 of the EFLA paper, with any mixer. Parameter names and shapes are those of
// flash-linear-attention's models; docs/models.md has them.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "efla/nn/layers/attention.h"
#include "efla/nn/layers/mixer.h"
#include "efla/nn/layers/mlp.h"
#include "efla/nn/models/language_model_config.h"
#include "efla/nn/models/language_model_state.h"

namespace efla::nn {

// x = embeddings[ids]; per layer x += attn(attn_norm(x)), x += mlp(mlp_norm(x)); logits = lm_head norm(x). attn is the
// mixer, or softmax attention with rotary positions; norms are RMS norms.
//
// ids are int64 tokens below vocab_size. cu_seqlens [N + 1] int64 with B = 1: 0, the ends of packed documents, which do
// not see each other. Functions throw Error naming the argument, and may be called by several threads at once, those
// with a state as long as it is another one.
class LanguageModel : public torch::nn::Module {
 public:
  // Weights are normal with initializer_range, biases 0, norms 1. Throws Error for a configuration that validate
  // refuses.
  LanguageModel(const LanguageModelConfig& config, const Initialiser& init);

  const LanguageModelConfig& config() const { return config_; }
  std::int64_t parameter_count() const;

  // Keeps of each layer its input alone for the backward, which computes the layer again.
  void set_recompute(bool recompute) { recompute_ = recompute; }

  // ids [B, T] → what the head reads, [B, T, D].
  torch::Tensor hidden(const torch::Tensor& ids, const torch::Tensor& cu_seqlens = {}) const;
  // ids [B, T] → [B, T, vocab_size] float32.
  torch::Tensor logits(const torch::Tensor& ids, const torch::Tensor& cu_seqlens = {}) const;
  // The mean of −log p(targets) over targets [B, T] other than −100, a float32 scalar, 0 where there is none. The
  // logits are never held whole (autograd::linear_cross_entropy).
  torch::Tensor loss(const torch::Tensor& ids, const torch::Tensor& targets,
                     const torch::Tensor& cu_seqlens = {}) const;

  // The head [vocab_size, D]: logits = hidden · headᵀ.
  const torch::Tensor& head() const { return head_->value; }

  // Decoding, without gradients.
  LanguageModelState initial_state(std::int64_t batch) const;
  // Takes in ids [B, T], T ≥ 1, a bounded number of tokens at a time; returns the logits after the last, [B,
  // vocab_size] float32.
  torch::Tensor prefill(const torch::Tensor& ids, LanguageModelState& state) const;
  // The same, with the logits after every token: [B, T, vocab_size].
  torch::Tensor prefill_all(const torch::Tensor& ids, LanguageModelState& state) const;
  // Takes in one token of each sequence, ids [B] → [B, vocab_size] float32.
  torch::Tensor step(const torch::Tensor& ids, LanguageModelState& state) const;

 private:
  struct Layer {
    std::shared_ptr<Weight> attn_norm, mlp_norm;
    std::shared_ptr<Mixer> mixer;  // one of these two
    std::shared_ptr<Attention> attention;
    std::shared_ptr<Mlp> mlp;
    std::vector<torch::Tensor> parameters;
  };

  Layer add_layer(torch::nn::Module& stack, std::int64_t index, const Initialiser& init) const;
  torch::Tensor norm(const torch::Tensor& x, const Weight& weight) const;
  // The layer with `mix` for its attn.
  torch::Tensor layer_output(const Layer& layer, const torch::Tensor& x,
                             const std::function<torch::Tensor(const torch::Tensor&)>& mix) const;
  void check_ids(const torch::Tensor& ids, std::int64_t rank) const;
  void check_state(const LanguageModelState& state, std::int64_t batch) const;
  // ids [B, T] in one go → [B, T, D].
  torch::Tensor advance(const torch::Tensor& ids, LanguageModelState& state) const;
  torch::Tensor advance_in_parts(const torch::Tensor& ids, LanguageModelState& state, bool all_logits) const;

  LanguageModelConfig config_;
  bool recompute_ = false;
  std::shared_ptr<Weight> embeddings_, norm_, head_;
  std::vector<Layer> layers_;
};

}  // namespace efla::nn
