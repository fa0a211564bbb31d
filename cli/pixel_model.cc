// The classifier of pixel sequences as training and evaluation see it.
#include <torch/types.h>

#include <memory>

#include "cli/smnist.h"
#include "efla/nn/models/pixel_classifier.h"

namespace efla::cli {

nlohmann::json default_model() { return nn::to_json(nn::PixelClassifierConfig{}); }

train::Classifier make_classifier(const nlohmann::json& model, std::uint64_t seed) {
  const auto classifier =
      std::make_shared<const nn::PixelClassifier>(nn::pixel_classifier_config_from_json(model), seed);
  train::Classifier result;
  for (const auto& parameter : classifier->named_parameters()) {
    result.parameters.emplace_back(parameter.key(), parameter.value());
  }
  result.forward = [classifier](const torch::Tensor& pixels) { return classifier->forward(pixels); };
  return result;
}

}  // namespace efla::cli
