// What generating costs as the context grows.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "efla/nn/models/language_model.h"

namespace efla::bench {

struct AtContext {
  std::int64_t context = 0;             // tokens taken in
  double prefill_tokens_per_s = 0;      // over those since the context before
  double median = 0, min = 0, p90 = 0;  // ms a token that is taken in and drawn
  std::int64_t state_bytes = 0;
  std::int64_t resident_bytes = 0;  // of the process, with model, libraries and what the prefill works in
};

// Takes in random tokens up to each of the rising contexts, and at each draws so many from a copy of the state.
void measure_generation(const nn::LanguageModel& model, const std::vector<std::int64_t>& contexts, std::int64_t draws,
                        const std::function<void(const AtContext&)>& write);

}  // namespace efla::bench
