// Modular counting, a task of state tracking: Grazzi et al., "Unlocking state-tracking in linear RNNs through negative
// eigenvalues", 2024.
#include <algorithm>

#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {

// Zeros and ones; the answer at each token is the number of ones so far modulo m.
Task modular_counting(const Parameters& parameters) {
  constexpr const char* kName = "modular-counting";
  const std::int64_t length = whole(kName, parameters, "length", 1), modulus = whole(kName, parameters, "modulus", 2);
  Task task;
  task.vocab = modulus;
  task.length = length;
  task.draw = [length, modulus](Random& random, Split, Example& example) {
    std::int64_t sum = 0;
    for (std::int64_t t = 0; t < length; ++t) {
      const auto bit = static_cast<std::int32_t>(random.below(2));
      sum = (sum + bit) % modulus;
      example.inputs.push_back(bit);
      example.targets.push_back(static_cast<std::int32_t>(sum));
    }
  };
  task.text = [](std::int32_t token) { return std::to_string(token); };
  return task;
}

}  // namespace efla::data::synthetic
