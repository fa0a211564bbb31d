// Training and generating with a whole model: tokens per second, beside the same model with its operator in eager
// LibTorch, and where the time goes.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace efla::bench {

// The name of the pixel-sequence classifier among the models; the others are presets of language models.
inline constexpr const char* kPixelClassifier = "pixel-classifier";

struct ModelSpeedOptions {
  std::string model = "efla-20m";
  std::int64_t length = 512;  // T of a language model's training
  int rounds = 3;             // of interleaved runs with the kernels and with the eager operator
  int threads = 1;
};

// Measures a model with mixer efla and random weights. A language model: a step of training (AdamW; one sequence per
// micro-batch, two micro-batches per thread) and tokens drawn one by one after a short prompt. The classifier: a step
// on 128 images. Prints the results and passes each to `write` as one object (docs/performance.md). Throws Error for an
// unknown model.
void measure_model(const ModelSpeedOptions& options, const std::function<void(const nlohmann::ordered_json&)>& write);

}  // namespace efla::bench
