// The classifier of images read pixel by pixel: section 5.1 of the EFLA paper. docs/model.md has the choices that the
// paper leaves open.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "efla/nn/layers/mixer.h"
#include "efla/nn/layers/mlp.h"

namespace efla::nn {

struct PixelClassifierConfig {
  std::string mixer = "efla";
  std::int64_t layers = 1, hidden = 64, heads = 1;
  double mlp_ratio = 0.0;        // inner width of each layer's MLP over hidden; 0: no MLP
  std::int64_t conv = 4;         // as MixerConfig
  bool positions = true;         // a learned vector for each token
  bool output_norm = true;       // as MixerConfig
  std::string pooling = "mean";  // what the head reads: "mean" over the tokens, or the "last"
  std::int64_t tokens = 784, classes = 10;

  MixerConfig mixer_config() const { return {mixer, hidden, heads, conv, output_norm}; }
};

// Throws Error, naming the field.
void validate(const PixelClassifierConfig& config);

nlohmann::json to_json(const PixelClassifierConfig& config);
// Throws Error for a field that is missing, unknown, or of another type.
PixelClassifierConfig pixel_classifier_config_from_json(const nlohmann::json& json);

// x = pixel · embedding + bias + position; per layer x += mixer(norm(x)), x += mlp(norm(x)); logits =
// head(pool(norm(x))). Norms are RMS norms.
class PixelClassifier : public torch::nn::Module {
 public:
  // Throws Error for a configuration that validate refuses.
  PixelClassifier(const PixelClassifierConfig& config, std::uint64_t seed);

  // pixels [B, tokens] float32 → logits [B, classes]. May be called by several threads at once.
  torch::Tensor forward(const torch::Tensor& pixels) const;

 private:
  struct Layer {
    std::shared_ptr<Weight> mixer_norm, mlp_norm;
    std::shared_ptr<Mixer> mixer;
    std::shared_ptr<Mlp> mlp;
  };

  PixelClassifierConfig config_;
  torch::Tensor embedding_, bias_, positions_;  // [1, D], [D], [tokens, D]
  std::vector<Layer> layers_;
  std::shared_ptr<Weight> norm_, head_;
  torch::Tensor head_bias_;  // [classes]
};

}  // namespace efla::nn
