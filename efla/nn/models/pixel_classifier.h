// The classifier of images that are read pixel by pixel: section 5.1 of EFLA (arXiv 2512.12602). docs/layers.md lists
// the choices that the paper leaves open.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "efla/nn/layers/block.h"

namespace efla::nn {

struct PixelClassifierConfig {
  std::string mixer = "efla";
  std::int64_t layers = 1, hidden = 64, heads = 1;
  double mlp_ratio = 0.0;        // inner width of each layer's MLP, relative to hidden; 0: no MLP
  std::int64_t conv = 4;         // as in MixerConfig
  bool positions = true;         // add a learned vector per position
  bool output_norm = true;       // as in MixerConfig
  std::string pooling = "mean";  // input of the head: "mean" over the tokens, or "last"
  std::int64_t tokens = 784, classes = 10;

  MixerConfig mixer_config() const { return {mixer, hidden, heads, conv, output_norm}; }
  // Returns the inner width of each layer's MLP; 0 without one.
  std::int64_t mlp_width() const;
  // Returns the number of parameters without small ones: projections of q, k, v and the output, and MLPs.
  double least_parameters() const;
};

// Throws Error that names the field.
void validate(const PixelClassifierConfig& config);

nlohmann::json to_json(const PixelClassifierConfig& config);
// Throws Error for a field that is missing, unknown, or of another type.
PixelClassifierConfig pixel_classifier_config_from_json(const nlohmann::json& json);

// Computes x = pixel · embedding + bias + position; per layer x += mixer(norm(x)), x += mlp(norm(x)); logits =
// head(pool(norm(x))). Norms are RMS norms.
class PixelClassifier : public torch::nn::Module {
 public:
  // Throws Error for an invalid configuration.
  PixelClassifier(const PixelClassifierConfig& config, std::uint64_t seed);

  // Maps pixels [B, tokens] float32 to logits [B, classes]. Several threads may call this function at once.
  torch::Tensor forward(const torch::Tensor& pixels) const;

 private:
  PixelClassifierConfig config_;
  torch::Tensor embedding_, bias_, positions_;  // [1, D], [D], [tokens, D]
  std::vector<std::shared_ptr<Block>> layers_;
  std::shared_ptr<Weight> norm_, head_;
  torch::Tensor head_bias_;  // [classes]
};

}  // namespace efla::nn
