// The language model of section 5.2 of EFLA (arXiv 2512.12602), with any mixer. Parameter names and shapes are those of
// flash-linear-attention's models; docs/checkpoints.md lists them.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "efla/nn/layers/block.h"
#include "efla/nn/models/language_model_config.h"
#include "efla/nn/models/language_model_state.h"

namespace efla::nn {

// Computes x = embeddings[ids]; per layer x += attn(attn_norm(x)), x += mlp(mlp_norm(x)); logits = lm_head norm(x).
// attn is the mixer, or softmax attention with rotary positions; norms are RMS norms.
//
// ids are int64 tokens below vocab_size. cu_seqlens [N + 1] int64 with B = 1: 0 and the ends of packed documents, which
// do not see each other. Functions throw Error that names the argument. Several threads may call the functions at once;
// functions with a state need a different state per thread.
class LanguageModel : public torch::nn::Module {
 public:
  // Draws weights normal with initializer_range; biases are 0, norms 1. Throws Error for an invalid configuration.
  LanguageModel(const LanguageModelConfig& config, const Initialiser& init);

  const LanguageModelConfig& config() const { return config_; }
  std::int64_t parameter_count() const;

  // Sets activation checkpointing: only each layer's input is kept, and the backward computes the layer again.
  void set_recompute(bool recompute);

  // Maps ids [B, T] to the input of the head, [B, T, D].
  torch::Tensor hidden(const torch::Tensor& ids, const torch::Tensor& cu_seqlens = {}) const;
  // Maps ids [B, T] to logits [B, T, vocab_size] float32.
  torch::Tensor logits(const torch::Tensor& ids, const torch::Tensor& cu_seqlens = {}) const;
  // Returns the mean of −log p(targets) over targets [B, T] other than −100, a float32 scalar; 0 if there are none. The
  // logits are never stored as a whole (autograd::linear_cross_entropy).
  torch::Tensor loss(const torch::Tensor& ids, const torch::Tensor& targets,
                     const torch::Tensor& cu_seqlens = {}) const;

  // Returns the same for tensors on the model's device that the caller has checked, in particular their values. Does
  // not wait for the GPU if waits_for_gpu() is false.
  torch::Tensor loss_of_checked(const torch::Tensor& ids, const torch::Tensor& targets,
                                const torch::Tensor& cu_seqlens = {}) const;
  // Returns whether a layer reads cu_seqlens on the CPU, as softmax attention does.
  bool waits_for_gpu() const;

  // Returns the head [vocab_size, D]: logits = hidden · headᵀ.
  const torch::Tensor& head() const { return head_->value; }

  // Returns the state of empty sequences, for decoding without gradients.
  LanguageModelState initial_state(std::int64_t batch) const;
  // Prefills ids [B, T], T ≥ 1, a bounded number of tokens at a time, and updates the state. Returns the logits [B,
  // vocab_size] float32 after the last token.
  torch::Tensor prefill(const torch::Tensor& ids, LanguageModelState& state) const;
  // Does the same in one call of each layer for arguments that the caller has checked, which lie on the model's device.
  // Returns the inputs of the head [B, T, D], in the type of the layers; logits_of maps rows of them [N, D] to logits
  // [N, vocab_size] float32.
  torch::Tensor advance(const torch::Tensor& ids, LanguageModelState& state) const;
  torch::Tensor logits_of(const torch::Tensor& hidden) const;
  // Does the same for N sequences, packed in ids [1, T] with cu_seqlens [N + 1], which follow the tokens in a state of
  // N sequences. No sequence may be empty. Replaces the tensors of the state, but not its number of tokens. Throws
  // Error for layers of softmax attention.
  torch::Tensor advance_packed(const torch::Tensor& ids, const torch::Tensor& cu_seqlens,
                               LanguageModelState& state) const;
  // Decodes one token per sequence: maps ids [B] to [B, vocab_size] float32. GpuDecoder is faster on a GPU.
  torch::Tensor step(const torch::Tensor& ids, LanguageModelState& state) const;
  // Returns the output of the mixer or the attention of layer `index` for normed [B, T, D], and updates the layer's
  // state.
  torch::Tensor mix(std::size_t index, const torch::Tensor& normed, LanguageModelState& state) const;

  // Throw Error unless ids are int64 tokens of the given rank, and unless the state is one of this model for `batch`
  // sequences.
  void check_ids(const torch::Tensor& ids, std::int64_t rank) const;
  void check_state(const LanguageModelState& state, std::int64_t batch) const;

 private:
  // Checks ids [B, T] and cu_seqlens and returns cu_seqlens on the device of ids; undefined stays undefined.
  torch::Tensor checked_cu_seqlens(const torch::Tensor& ids, const torch::Tensor& cu_seqlens) const;
  // Computes hidden() from checked arguments.
  torch::Tensor hidden_of(const torch::Tensor& ids, const torch::Tensor& cu_seqlens) const;
  BlockConfig block_config(std::int64_t index) const;
  // Returns the input of the head after all layers, each with mix(index, normed) as its attn.
  torch::Tensor stack_output(const torch::Tensor& ids,
                             const std::function<torch::Tensor(std::size_t, const torch::Tensor&)>& mix) const;

  LanguageModelConfig config_;
  bool recompute_ = false;
  std::shared_ptr<Weight> embeddings_, norm_, head_;
  std::vector<std::shared_ptr<Block>> layers_;
};

}  // namespace efla::nn
