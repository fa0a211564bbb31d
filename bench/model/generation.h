// Memory and time per token of generation against the length of the context.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/model/bench_model.h"

namespace efla::bench {

struct GenerationOptions {
  BenchModel model;
  std::string weights = "float32";     // how weights are stored for decoding
  std::string kv_cache_type = "auto";  // of keys and values
  std::int64_t longest = 1, draws = 1;
  std::int64_t texts = 1;  // texts that are continued together, on a GPU
  int threads = 0;
};

// Prefills random tokens, up to 1024, 4096, … and finally the longest context, and at
// each context draws `draws` tokens per text from copies of the state. Prints a line per context and passes its result
// to `write` as one object (docs/performance.md).
void measure_generation(const GenerationOptions& options, const c10::Device& device,
                        const std::function<void(const nlohmann::ordered_json&)>& write);

}  // namespace efla::bench
