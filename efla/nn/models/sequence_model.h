// The small model of the synthetic tasks: that of MAD (Poli et al., "Mechanistic design and scaling of hybrid
// architectures", 2024), with any mixer and any width.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "efla/nn/layers/mixer.h"
#include "efla/nn/layers/mlp.h"

namespace efla::nn {

struct SequenceModelConfig {
  std::string mixer = "efla";  // a name of mixer_presets(); softmax has no positions
  std::int64_t vocab = 16;
  std::int64_t hidden = 128;  // D
  std::int64_t layers = 2;    // of a mixer and an MLP each
  std::int64_t heads = 4;
  std::int64_t head_dim = 0;  // 0: hidden / heads
  bool reconstructs = false;  // every token is told from the vector at the last

  // The MLP's inner width: 352 at D = 128, as MAD has it.
  std::int64_t inner() const { return hidden * 11 / 4; }
  MixerConfig mixer_config() const;
};

// Throws Error, naming the field.
void validate(const SequenceModelConfig& config);

nlohmann::json to_json(const SequenceModelConfig& config);

// x = embeddings[ids]; per layer x += mixer(norm(x)), x += mlp(norm(x)); logits = head(norm(x)) + bias. Norms are RMS
// norms with eps 1e-5. A model that reconstructs replaces x by the vector at the sequence's last token + a sine and
// cosine of the position, and that by [norm, linear, GELU] twice, before the head.
class SequenceModel : public torch::nn::Module {
 public:
  // Embeddings are normal with deviation 0.02, the other weights as PyTorch's Linear starts, biases 0, norms 1. Throws
  // Error for a configuration that validate refuses.
  SequenceModel(const SequenceModelConfig& config, const Initialiser& init);

  // ids [B, T] int64 below vocab; places [M] int64 below B · T: token t of sequence b is b · T + t. The logits at those
  // places alone, [M, vocab] float32. May be called by several threads at once.
  torch::Tensor logits(const torch::Tensor& ids, const torch::Tensor& places) const;

 private:
  struct Layer {
    std::shared_ptr<Weight> mixer_norm, mlp_norm;
    std::shared_ptr<Mixer> mixer;
    std::shared_ptr<Mlp> mlp;
  };
  struct DecoderLayer {
    std::shared_ptr<Weight> norm, linear;
    torch::Tensor bias;
  };

  void add_layer(const std::string& name, const Initialiser& init);
  void add_decoder_layer(const std::string& name, const Initialiser& init);
  torch::Tensor decoded(const torch::Tensor& x, const torch::Tensor& places) const;  // [B, T, D] → [M, D]

  SequenceModelConfig config_;
  std::shared_ptr<Weight> embeddings_, norm_, head_;
  torch::Tensor head_bias_;
  std::vector<Layer> layers_;
  std::vector<DecoderLayer> decoder_;
};

}  // namespace efla::nn
