// Training and generating with a whole model: tokens a second, beside the same model with its operator in eager
// LibTorch, and where the time goes.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace efla::bench {

// Name of the pixel-sequence classifier among the models that can be measured; the others are presets of language
// models.
inline constexpr const char* kPixelClassifier = "pixel-classifier";

struct ModelSpeedOptions {
  std::string model = "efla-20m";
  std::int64_t length = 512;  // T of a language model's training
  int rounds = 3;             // in each, the kernels and the eager form have a turn
  int threads = 1;
};

// Of a model with mixer efla and random weights. Language models: a step of training (AdamW; a sequence a micro-batch,
// two for each thread) and tokens drawn one by one after a short prompt. The classifier: a step on 128 images. Prints
// what it found and hands each result over as one object (bench/README.md). Throws Error for a model that there is not.
void measure_model(const ModelSpeedOptions& options, const std::function<void(const nlohmann::ordered_json&)>& write);

}  // namespace efla::bench
