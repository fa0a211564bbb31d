// Inference of a language model on a GPU. A decode step launches a few kernels per layer, each of which reads its
// weights once, and is replayed as a CUDA graph. docs/design/2026-11-cuda-decode.md explains the design.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "efla/nn/inference/gpu_step.h"
#include "efla/nn/inference/layer_parameters.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/models/language_model.h"
#include "efla/torch/autocast.h"

namespace efla::nn {

// Outputs agree with LanguageModel but for rounding. With weights in bfloat16 the model's weights must already have
// bfloat16 values (round_weights). The model itself computes mixers that the kernel mixer_step does not take. Only one
// thread may use the object at a time.
class GpuDecoder {
 public:
  // Packs the weights of a model that lies on a GPU. The model must outlive the object. Only ids in [0, drawable) may
  // be drawn. Throws Error for weights in integers.
  GpuDecoder(const LanguageModel& model, WeightType weights, std::int64_t drawable);
  ~GpuDecoder();

  // Do the same as LanguageModel's functions. With weights in bfloat16, matrix products are in bfloat16, as in training
  // with autocast.
  torch::Tensor prefill(const torch::Tensor& ids, LanguageModelState& state) const;
  // Decodes one token per sequence, ids [B]. Replays a CUDA graph from the state's second step on, and from the second
  // step after a cache of keys and values has grown. Throws Error for a bad argument.
  StepOutput step(const torch::Tensor& ids, LanguageModelState& state) const;
  // Decodes ids on the model's device that a step has drawn. The ids are not checked, because a check would wait for
  // the GPU.
  StepOutput step_drawn(const torch::Tensor& ids, LanguageModelState& state) const;

  // Do the same without the head: return the inputs of the head [1, T, D] float32. The arguments are not checked, and
  // lie on the model's device.
  torch::Tensor advance(const torch::Tensor& ids, LanguageModelState& state) const;
  torch::Tensor advance_packed(const torch::Tensor& ids, const torch::Tensor& cu_seqlens,
                               LanguageModelState& state) const;
  // Maps inputs of the head [N, D] to logits [N, vocab_size] float32.
  torch::Tensor logits(const torch::Tensor& hidden) const;

 private:
  struct Layer;
  struct Cache;
  struct Identity;

  std::unique_ptr<libtorch::Bfloat16OnGpu> use_precision() const;
  torch::Tensor packed(const std::vector<torch::Tensor>& parts) const;
  Layer packed_layer(std::int64_t index) const;
  torch::Tensor mix(std::size_t index, const torch::Tensor& x, LanguageModelState& state,
                    const std::optional<AttentionStep>& attention) const;
  torch::Tensor stack_output(const torch::Tensor& ids, const torch::Tensor& slot, LanguageModelState& state) const;
  std::shared_ptr<Cache> cache_for(LanguageModelState& state) const;

  const LanguageModel& model_;
  std::shared_ptr<const Identity> identity_;  // marks caches of this decoder; unique as long as such a cache exists
  WeightType weights_;
  std::int64_t drawable_;
  MixerPlan plan_;
  torch::Tensor embeddings_, norm_, head_;
  std::vector<Layer> layers_;
};

}  // namespace efla::nn
