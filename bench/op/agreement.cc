#include "bench/op/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace efla::bench {
namespace {

double relative_rms(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor expected = want.to(at::kDouble);
  const double norm = expected.norm().item<double>();
  const double difference = (got.to(at::kDouble) - expected).norm().item<double>();
  return difference == 0.0 ? 0.0 : difference / norm;
}

}  // namespace

// Returns the limit of errors: rounding of correct outputs is far below, a wrong term far above.
double tolerance(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 5e-3 : 1e-5; }

Agreement compare(const Outputs& got, const Outputs& want, double tolerance) {
  Agreement agreement;
  if (got.size() != want.size()) agreement.fault = fmt::format("{} outputs, not {}", got.size(), want.size());
  for (std::size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    const auto& [name, value] = got[i];
    if (name != want[i].first || value.sizes() != want[i].second.sizes()) {
      return {std::numeric_limits<double>::quiet_NaN(), fmt::format("{} is not shaped like {}", name, want[i].first)};
    }
    const double error = relative_rms(value, want[i].second);
    if (!(error <= tolerance)) {
      if (agreement.fault.empty()) {
        agreement.fault = fmt::format("{} is off by {:.2g}, at most {:.2g}", name, error, tolerance);
      }
      if (std::isnan(error)) return {error, agreement.fault};
    }
    agreement.error = std::max(agreement.error, error);
  }
  return agreement;
}

}  // namespace efla::bench
