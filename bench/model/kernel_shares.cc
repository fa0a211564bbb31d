#include "bench/model/kernel_shares.h"

#include <algorithm>
#include <limits>

namespace efla::bench {

std::map<std::string, double> seconds_of_parts(std::vector<KernelTime> kernels) {
  std::sort(kernels.begin(), kernels.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::map<std::string, double> parts;
  double counted_until = -std::numeric_limits<double>::infinity();
  for (const auto& [part, begin, end] : kernels) {
    parts[part] += std::max(0.0, end - std::max(begin, counted_until));
    counted_until = std::max(counted_until, end);
  }
  return parts;
}

}  // namespace efla::bench
