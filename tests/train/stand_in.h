// A small classifier and small images for the tests of training: seconds become milliseconds.
#pragma once

#include <torch/nn/functional/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <utility>

#include "efla/base/random.h"
#include "efla/data/images.h"
#include "efla/eval/classifier.h"

namespace efla::test {

// count images of 4 × 4 pixels: random ink, with the pixel of the label's number always full.
inline data::ImageSet small_images(std::int64_t count, std::uint64_t seed) {
  data::ImageSet set;
  set.count = count;
  set.rows = set.cols = 4;
  Random random(seed);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto label = static_cast<std::uint8_t>(random.below(data::kClasses));
    for (std::uint8_t p = 0; p < 16; ++p) {
      set.pixels.push_back(p == label ? 255 : static_cast<std::uint8_t>(random.below(160)));
    }
    set.labels.push_back(label);
  }
  return set;
}

// logits = W₂ tanh(W₁ (x + position) + b₁) + b₂, and a parameter that nothing uses.
inline eval::Classifier small_classifier(std::uint64_t seed) {
  Random random(seed);
  const auto parameter = [&](std::vector<std::int64_t> shape) {
    torch::Tensor tensor = torch::empty(shape);
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.data_ptr<float>()[i] = static_cast<float>(0.3 * random.normal());
    }
    return tensor.requires_grad_(true);
  };
  const auto w1 = parameter({24, 16}), b1 = parameter({24}), w2 = parameter({10, 24}), b2 = parameter({10});
  const auto positions = parameter({1, 16}), unused = parameter({3});
  return {{{"w1", w1}, {"b1", b1}, {"w2", w2}, {"b2", b2}, {"positions", positions}, {"unused", unused}},
          [=](const torch::Tensor& x) {
            const auto hidden = torch::tanh(torch::nn::functional::linear(x + positions, w1, b1));
            return torch::nn::functional::linear(hidden, w2, b2);
          }};
}

// The bytes of every parameter, behind one another.
inline std::string parameter_bytes(const eval::Classifier& classifier) {
  std::string bytes;
  for (const auto& [name, tensor] : classifier.parameters) {
    bytes.append(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
  }
  return bytes;
}

}  // namespace efla::test
