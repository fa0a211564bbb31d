// The learning rate of a step: a linear warm-up, then constant or half a cosine down to zero.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace efla::train {

enum class Schedule { constant, cosine };

// The rate of step s of n (0 ≤ s < n): peak · (s + 1) / w while s < w, with w = ⌊warmup · n⌋ warm-up steps; afterwards
// peak (constant) or peak · (1 + cos(π (s − w) / (n − w))) / 2 (cosine). warmup in [0, 1).
inline double learning_rate(Schedule schedule, double peak, double warmup, std::int64_t step, std::int64_t steps) {
  const auto rising = static_cast<std::int64_t>(warmup * static_cast<double>(steps));
  if (step < rising) return peak * static_cast<double>(step + 1) / static_cast<double>(rising);
  if (schedule == Schedule::constant) return peak;
  const double done =
      static_cast<double>(step - rising) / static_cast<double>(std::max<std::int64_t>(steps - rising, 1));
  return peak * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
}

}  // namespace efla::train
