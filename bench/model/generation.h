// Memory and time per token of generation against the length of the context.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace efla::bench {

struct GenerationOptions {
  std::string preset, mixer;
  std::string weights = "float32";  // how weights are stored for decoding on a GPU
  std::int64_t longest = 1, draws = 1;
  std::int64_t texts = 1;  // texts that are continued together, on a GPU
};

// Prefills random tokens with a model of random weights, up to 1024, 4096, … and finally the longest context, and at
// each context draws `draws` tokens per text from copies of the state. Prints a line per context and passes its result
// to `write` as one object (docs/performance.md). Throws Error for an unknown preset or mixer.
void measure_generation(const GenerationOptions& options, const c10::Device& device,
                        const std::function<void(const nlohmann::ordered_json&)>& write);

}  // namespace efla::bench
