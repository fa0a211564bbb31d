// Replies per second of the engine that serves many texts at once.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/model/bench_model.h"

namespace efla::bench {

struct ServingOptions {
  BenchModel model{.preset = "efla-20m", .mixer = ""};
  std::vector<std::int64_t> sessions{1, 8, 32};  // texts at once
  std::vector<std::string> weights{"float32", "bfloat16", "int8"};
  std::int64_t tokens = 64;  // of each reply
  int rounds = 3;            // every combination runs once per round
  bool on_gpu = false;
  int threads = 0;
};

// Times replies of several texts at once, and forks, saves and loads a session. Prints a
// line per combination and passes its result to `write` as one object (docs/performance.md).
void measure_serving(const ServingOptions& options, const std::function<void(const nlohmann::ordered_json&)>& write);

}  // namespace efla::bench
