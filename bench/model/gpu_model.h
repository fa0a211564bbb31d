// Training and generating with a whole model on a GPU: tokens per second, memory, and where the time goes.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace efla::bench {

struct GpuModelOptions {
  std::string model = "efla-340m", mixer = "efla";
  std::int64_t length = 2048, batch = 16;  // tokens and sequences of a step of training, which is one micro-batch
  int rounds = 3;                          // of ten training steps or 200 decode steps each
};

// Measures a language model with random weights on the first GPU: tokens drawn for one text and for 64 together, with
// weights in float32 and in bfloat16, and steps of training with products in bfloat16. Prints the results and passes
// each to `write` as one object (docs/performance.md). Throws Error for an unknown model.
void measure_model_on_gpu(const GpuModelOptions& options,
                          const std::function<void(const nlohmann::ordered_json&)>& write);

}  // namespace efla::bench
