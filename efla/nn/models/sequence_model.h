// The small model for the synthetic tasks: the model of MAD (Poli et al., "Mechanistic design and scaling of hybrid
// architectures", 2024, arXiv 2403.17844), with any mixer and any width. docs/synthetic.md describes the tasks.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "efla/nn/layers/block.h"

namespace efla::nn {

struct SequenceModelConfig {
  std::string mixer = "efla";  // a name of mixer_presets(); softmax has no positions
  std::int64_t vocab = 16;
  std::int64_t hidden = 128;  // D
  std::int64_t layers = 2;    // each a mixer and an MLP
  std::int64_t heads = 4;
  std::int64_t head_dim = 0;         // 0: hidden / heads
  std::int64_t steps_per_token = 0;  // as MixerConfig
  bool reconstructs = false;         // every token is predicted from the output at the last token

  // Returns the inner width of the MLP: 352 for D = 128, as in MAD.
  std::int64_t inner() const { return hidden * 11 / 4; }
  MixerConfig mixer_config() const;
  // Returns the number of parameters without small ones: embeddings, head, projections of q, k, v and the output, MLPs.
  double least_parameters() const;
};

// Throws Error that names the field.
void validate(const SequenceModelConfig& config);

nlohmann::json to_json(const SequenceModelConfig& config);

// Computes x = embeddings[ids]; per layer x += mixer(norm(x)), x += mlp(norm(x)); logits = head(norm(x)) + bias. Norms
// are RMS norms with eps 1e-5. A model that reconstructs replaces x by the output at the last token plus sines and
// cosines of the position, applies [norm, linear, GELU] twice, and then the norm and the head.
class SequenceModel : public torch::nn::Module {
 public:
  // Draws normal embeddings with standard deviation 0.02, and the other weights like PyTorch's Linear; biases are 0,
  // norms 1. Throws Error for an invalid configuration.
  SequenceModel(const SequenceModelConfig& config, const Initialiser& init);

  // Maps ids [B, T] int64 below vocab to the logits [M, vocab] float32 at `places` [M] int64 only; token t of sequence
  // b is place b · T + t. Several threads may call this function at once.
  torch::Tensor logits(const torch::Tensor& ids, const torch::Tensor& places) const;

 private:
  struct DecoderLayer {
    std::shared_ptr<Weight> norm, linear;
    torch::Tensor bias;
  };

  void add_decoder_layer(const std::string& name, const Initialiser& init);
  torch::Tensor decoded(const torch::Tensor& x, const torch::Tensor& places) const;  // [B, T, D] → [M, D]

  SequenceModelConfig config_;
  std::shared_ptr<Weight> embeddings_, norm_, head_;
  torch::Tensor head_bias_;
  std::vector<std::shared_ptr<Block>> layers_;
  std::vector<DecoderLayer> decoder_;
};

}  // namespace efla::nn
