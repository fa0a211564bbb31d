// Training runs of language models as their folders have them, made up.
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "experiments/common/lm_runs.h"

namespace efla::test {

// A run whose loss falls to `floor` over 500 steps, with four evaluations and two samples.
inline experiments::LmRunRecord invented_lm_run(const std::string& name, const std::string& mixer, double lr,
                                                double floor) {
  experiments::LmRunRecord record{name, {}, {}};
  record.run = {{"command", "efla train lm study.toml --out " + name},
                {"parameters", 1032448},
                {"config",
                 {{"model", {{"mixer", mixer}, {"hidden_size", 128}}},
                  {"training", {{"lr", lr}, {"seed", 42}, {"betas", {0.9, 0.95}}}}}},
                {"environment", {{"cpu", "a processor"}, {"commit", "abc"}}}};
  for (std::int64_t step = 1; step <= 500; ++step) {
    const double loss = floor + 4.0 * std::exp(-0.01 * static_cast<double>(step)) + 0.05 * std::sin(step);
    const std::int64_t tokens = 8192 * step;
    record.metrics.push_back({{"event", "step"},
                              {"step", step},
                              {"tokens", tokens},
                              {"loss", loss},
                              {"lr", lr},
                              {"grad_norm", 1.0},
                              {"tokens_per_second", 5000.0 + static_cast<double>(step % 7)},
                              {"seconds", 1.6 * static_cast<double>(step)}});
    if (step % 125 != 0) continue;
    record.metrics.push_back({{"event", "evaluation"},
                              {"step", step},
                              {"tokens", tokens},
                              {"loss", loss},
                              {"perplexity", std::exp(loss)},
                              {"bits_per_byte", loss / std::log(2.0)},
                              {"seconds", 1.0}});
    if (step % 250 == 0) {
      record.metrics.push_back(
          {{"event", "sample"}, {"step", step}, {"tokens", tokens}, {"text", "of " + name}, {"seconds", 1.0}});
    }
  }
  return record;
}

}  // namespace efla::test
