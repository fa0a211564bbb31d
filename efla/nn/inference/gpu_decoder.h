// A language model's inference on a GPU. A decode step has few kernels per layer, of which each reads its weights once,
// and is replayed as a CUDA graph.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "efla/autograd/autocast.h"
#include "efla/nn/inference/layer_parameters.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/models/language_model.h"

namespace efla::nn {

// Outputs agree with LanguageModel but for rounding. Weights that it stores in bfloat16 must have such values in the
// model too (round_weights). Layers of softmax attention and mixers that are computed by none of its kernels are the
// model's. Not for several threads at once.
class GpuDecoder {
 public:
  // Packs the weights of a model on a GPU, which must outlive the object. Ids in [0, drawable) may be drawn. Throws
  // Error for weights in int8.
  GpuDecoder(const LanguageModel& model, WeightType weights, std::int64_t drawable);
  ~GpuDecoder();

  // Of a step, overwritten by the next one of the same state.
  struct Output {
    torch::Tensor logits;  // [B, vocab_size] float32
    torch::Tensor
        likeliest;  // [B, 2] float64: the drawable id with the largest logit, the lowest of equal ones, and it
  };

  // Do what LanguageModel's functions do; with weights in bfloat16 the activations are computed as in training with
  // this precision, in bfloat16 too.
  torch::Tensor prefill(const torch::Tensor& ids, LanguageModelState& state) const;
  torch::Tensor prefill_packed(const torch::Tensor& ids, const torch::Tensor& cu_seqlens,
                               LanguageModelState& state) const;

  // Decodes one token per sequence, ids [B]. Replays a CUDA graph from the state's second step on, unless a layer
  // attends. Throws Error for a bad argument.
  Output step(const torch::Tensor& ids, LanguageModelState& state) const;
  // The same for ids on the model's device that a step has drawn. They are not checked, because that would wait for
  // them.
  Output step_drawn(const torch::Tensor& ids, LanguageModelState& state) const;

 private:
  struct Layer;
  struct Projected;
  struct Step;
  struct Cache;
  struct Identity;

  std::unique_ptr<autograd::Bfloat16OnGpu> use_precision() const;
  torch::Tensor packed(const std::vector<torch::Tensor>& parts) const;
  Layer packed_layer(std::int64_t index) const;
  Projected project(const Layer& layer, const torch::Tensor& x) const;
  Step step_of(const Layer& layer, const Projected& projected, const MixerState& state) const;
  torch::Tensor mix(std::size_t index, const torch::Tensor& x, LanguageModelState& state) const;
  torch::Tensor logits(torch::Tensor x, LanguageModelState& state) const;
  std::shared_ptr<Cache> cache_for(LanguageModelState& state) const;

  const LanguageModel& model_;
  std::shared_ptr<const Identity> identity_;  // that no other decoder has as long as a cache of this one exists
  WeightType weights_;
  std::int64_t drawable_;
  MixerShape mixer_;
  torch::Tensor embeddings_, norm_, head_;
  std::vector<Layer> layers_;
};

}  // namespace efla::nn
