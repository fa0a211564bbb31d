// The learning rate of each step: a linear warm-up, then constant or half a cosine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace efla::train {

enum class Schedule { constant, cosine };

inline std::string_view schedule_name(Schedule schedule) {
  return schedule == Schedule::cosine ? "cosine" : "constant";
}

struct LearningRate {
  Schedule schedule = Schedule::cosine;
  double peak = 0.0, floor = 0.0;  // the warm-up begins and the cosine ends at the floor
  std::int64_t warmup = 0;         // steps
  std::int64_t steps = 0;          // of the whole run

  // Returns the rate of step s of n (0 ≤ s < n), with w warm-up steps: floor + (peak − floor)(s + 1)/w while s < w;
  // afterwards peak (constant) or floor + (peak − floor)(1 + cos(π (s − w)/(n − w)))/2 (cosine).
  double at(std::int64_t step) const {
    const double range = peak - floor;
    if (step < warmup) return floor + range * static_cast<double>(step + 1) / static_cast<double>(warmup);
    if (schedule == Schedule::constant) return peak;
    const auto falling = static_cast<double>(std::max<std::int64_t>(steps - warmup, 1));
    return floor + range * 0.5 * (1.0 + std::cos(std::numbers::pi * (static_cast<double>(step - warmup) / falling)));
  }
};

// Returns how many of n steps a fraction in [0, 1) is, rounded down.
inline std::int64_t steps_of(double fraction, std::int64_t steps) {
  return static_cast<std::int64_t>(fraction * static_cast<double>(steps));
}

}  // namespace efla::train
