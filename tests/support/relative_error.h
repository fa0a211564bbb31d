// The error of sums relative to the size of their terms.
#pragma once

#include <cmath>
#include <limits>

namespace efla::test {

// The root-mean-square distance of `got` from `expected` relative to the size of the terms that sum to `expected`;
// infinite where one is not a number.
struct RelativeError {
  double difference = 0, size = 0;
  void add(double got, double expected, double terms) {
    difference += (got - expected) * (got - expected);
    size += terms * terms;
  }
  double value() const {
    const double error = std::sqrt(difference / size);
    return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
  }
};

}  // namespace efla::test
