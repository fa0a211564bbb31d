// Statistics over a handful of values, such as the accuracies of several seeds.
#pragma once

#include <span>
#include <vector>

namespace efla {

// deviation is the sample standard deviation (n − 1), NaN for one value. All but count are NaN for no value.
struct Spread {
  double mean, deviation, low, high;
  int count;
};
Spread spread_of(std::span<const double> values);

// Returns the standard error of the mean, NaN below two values.
double standard_error(const Spread& spread);

// Returns the middle value, the upper one of two; NaN for no value.
double median(std::vector<double> values);

}  // namespace efla
