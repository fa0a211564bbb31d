#include "efla/ref/linear.h"

#include <cmath>
#include <vector>

#include "efla/ref/elementwise.h"

namespace efla::ref {
namespace {

// Returns row m of x, or its RMS norm if the problem has a norm.
std::vector<double> input_row(const LinearForward& p, std::int64_t m) {
  std::vector<double> row;
  double squares = 0;
  for (std::int64_t d = 0; d < p.x.extent[1]; ++d) {
    row.push_back(p.x(m, d));
    squares += row.back() * row.back();
  }
  if (!p.norm_weight) return row;
  const double r = 1 / std::sqrt(squares / static_cast<double>(p.x.extent[1]) + p.norm_eps);
  for (std::int64_t d = 0; d < p.x.extent[1]; ++d) row[static_cast<std::size_t>(d)] *= r * p.norm_weight(d);
  return row;
}

}  // namespace

void linear(const LinearForward& p) {
  for (std::int64_t m = 0; m < p.x.extent[0]; ++m) {
    const auto x = input_row(p, m);
    const auto product = [&](std::int64_t n) {
      double sum = 0;
      for (std::int64_t d = 0; d < p.x.extent[1]; ++d) sum += x[static_cast<std::size_t>(d)] * p.weight_at(n, d);
      return sum;
    };
    for (std::int64_t n = 0; n < p.y.extent[1]; ++n) {
      double value = product(n);
      if (p.swiglu) value *= sigmoid(value) * product(p.y.extent[1] + n);
      p.y(m, n) = static_cast<float>(value + (p.residual ? p.residual(m, n) : 0.0));
    }
  }
}

}  // namespace efla::ref
