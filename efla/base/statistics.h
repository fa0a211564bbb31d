// Statistics over a handful of values, such as the accuracies of several seeds.
#pragma once

#include <span>
#include <vector>

namespace efla {

// deviation is the sample standard deviation (divided by n − 1), NaN for one value. low and high are the least and the
// greatest value. Without values all members but count are NaN.
struct Spread {
  double mean, deviation, low, high;
  int count;
};
Spread spread_of(std::span<const double> values);

// Returns the standard error of the mean; NaN for fewer than two values.
double standard_error(const Spread& spread);

// Returns whether the means differ by more than the sum of the two standard deviations. If one side has a single value,
// which has no deviation, every difference counts.
bool beyond_spread(const Spread& a, const Spread& b);

// Returns the median. Of an even number of values it is the greater of the two middle ones. Returns NaN without values.
double median(std::vector<double> values);

}  // namespace efla
