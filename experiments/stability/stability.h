// How the state grows over many tokens for each step size, ‖k‖² and precision (README.md).
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>

namespace efla::experiments {

// Runs every sweep of one head over `tokens` tokens, prints an outcome per line, and hands over each sweep's results as
// one object. Measures no time.
void measure_stability(std::int64_t tokens, const std::function<void(const nlohmann::ordered_json&)>& write);

}  // namespace efla::experiments
