// Draws the next token from a row of logits: repetition penalty, temperature, top-k and top-p, in this order.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "efla/base/random.h"

namespace efla::engine {

struct SamplingOptions {
  double temperature = 0.0;         // T of softmax(logits / T); 0: the largest logit, no randomness
  std::int64_t top_k = 0;           // keep only the k largest logits; 0: all
  double top_p = 1.0;               // keep only the smallest set of largest probabilities with sum ≥ p, at least one
  double repetition_penalty = 1.0;  // above 1: tokens that occurred before become less probable

  auto operator<=>(const SamplingOptions&) const = default;
};

// Throws Error that names the option.
void validate(const SamplingOptions& options);

// The set of ids that occur in a text. Its size does not depend on the length of the text.
class SeenIds {
 public:
  explicit SeenIds(std::int64_t vocab_size) : bits_((vocab_size + 7) / 8) {}

  void add(std::int64_t id) { bits_[id / 8] |= static_cast<std::uint8_t>(1U << (id % 8)); }
  bool contains(std::int64_t id) const { return (bits_[id / 8] >> (id % 8) & 1U) != 0; }

  // [⌈vocab_size / 8⌉], id i in bit i % 8 of byte i / 8.
  std::vector<std::uint8_t>& bits() { return bits_; }
  const std::vector<std::uint8_t>& bits() const { return bits_; }

 private:
  std::vector<std::uint8_t> bits_;
};

// Returns the logit of a seen id after the repetition penalty of this factor.
inline float penalised(float logit, float factor) { return logit < 0.0F ? logit * factor : logit / factor; }

// Returns the number in [0, 1) that decides a draw: 53 bits, because the bits of Random::uniform would never reach the
// tail of a large vocabulary.
double unit_number(Random& random);

// Draws an id from a row of logits. Logits of seen ids are divided by the penalty if positive and multiplied if
// negative (Keskar et al., "CTRL: a conditional transformer language model for controllable generation", 2019,
// section 4.1, in the form of Hugging Face's RepetitionPenaltyLogitsProcessor). top-p follows Holtzman et al., "The
// curious case of neural text degeneration", 2020, section 3.1; it counts probabilities after top-k. Of equal logits
// the lower id comes first. The same logits and random numbers give the same id on every machine. Throws
// std::runtime_error if a logit is NaN or +infinity, or all are −infinity.
std::int64_t sample(std::span<const float> logits, const SeenIds& seen, const SamplingOptions& options, Random& random);

}  // namespace efla::engine
