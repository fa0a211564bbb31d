#include "efla/base/statistics.h"

#include <algorithm>
#include <cmath>

namespace efla {

Spread spread_of(std::span<const double> values) {
  if (values.empty()) return {NAN, NAN, NAN, NAN, 0};
  const auto n = static_cast<double>(values.size());
  double sum = 0.0, squares = 0.0;
  for (const double value : values) sum += value;
  const double mean = sum / n;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return {mean, values.size() > 1 ? std::sqrt(squares / (n - 1.0)) : NAN, *low, *high, static_cast<int>(values.size())};
}

double standard_error(const Spread& spread) { return spread.deviation / std::sqrt(static_cast<double>(spread.count)); }

bool beyond_spread(const Spread& a, const Spread& b) {
  const double spread = a.count > 1 && b.count > 1 ? a.deviation + b.deviation : 0.0;
  return std::abs(a.mean - b.mean) > spread;
}

double median(std::vector<double> values) {
  if (values.empty()) return NAN;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace efla
