// What the files of the tasks share: their makers, for the table in task.cc, and checks of parameters.
#pragma once

#include <cstdint>
#include <string>

#include "efla/data/synthetic/task.h"

namespace efla::data::synthetic {

Task in_context_recall(const Parameters& parameters);
Task noisy_recall(const Parameters& parameters);
Task fuzzy_recall(const Parameters& parameters);
Task memorisation(const Parameters& parameters);
Task compression(const Parameters& parameters);
Task selective_copying(const Parameters& parameters);
Task mqar(const Parameters& parameters);
Task mqar_set(const Parameters& parameters);
Task palindrome(const Parameters& parameters);
Task stack(const Parameters& parameters);
Task parity(const Parameters& parameters);
Task modular_counting(const Parameters& parameters);
Task permutations_of_3(const Parameters& parameters);
Task permutations_of_5(const Parameters& parameters);

// Returns an integer parameter. Throws Error unless it is an integer from `least` to 2²⁴.
std::int64_t whole(const char* task, const Parameters& parameters, const char* name, std::int64_t least);

// Returns an even integer parameter, checked in the same way.
std::int64_t even(const char* task, const Parameters& parameters, const char* name, std::int64_t least);

// Throws Error about the parameter unless left ≤ right. The message has the inequality ("4 pairs <= length") and the
// numbers on its sides.
void require_at_most(const char* task, const char* parameter, std::int64_t left, std::int64_t right,
                     const std::string& inequality);

// The sequence of in-context recall; without noise, `noise` and noise_tokens are 0.
struct Recall {
  std::int64_t keys, values, noise_tokens;  // in this order in the vocabulary
  std::int64_t slots;                       // pairs or pieces of noise; the last slot is the probe
  double noise;                             // fraction of the slots
};
void draw_recall(const Recall& recall, Random& random, Split split, Example& example);

}  // namespace efla::data::synthetic
