// The averages of a progress bar.
#pragma once

#include <algorithm>
#include <cstdint>

namespace efla::cli {

// A moving average in which the newest of n values weighs 1/n at first, as in a mean, and later a twentieth.
class MovingAverage {
 public:
  void add(double value) { value_ += std::max(1.0 / static_cast<double>(++count_), 0.05) * (value - value_); }
  double value() const { return value_; }

 private:
  std::int64_t count_ = 0;
  double value_ = 0.0;
};

}  // namespace efla::cli
