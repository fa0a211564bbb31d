#include "efla/ref/add_rms_norm.h"

#include <cmath>
#include <vector>

#include "efla/ref/elementwise.h"

namespace efla::ref {
namespace {

double inverse_rms(const std::vector<double>& row, double eps) {
  double squares = 0;
  for (const double x : row) squares += x * x;
  return 1 / std::sqrt(squares / static_cast<double>(row.size()) + eps);
}

}  // namespace

template <class T>
void add_rms_norm(const AddRmsNormForward<T>& p) {
  std::vector<double> sum(static_cast<std::size_t>(p.x.extent[1]));
  for (std::int64_t row = 0; row < p.x.extent[0]; ++row) {
    for (std::size_t d = 0; d < sum.size(); ++d) {
      sum[d] = double{p.x(row, d)} + (p.branch ? to_float(p.branch(row, d)) : 0.0);
      if (p.branch) p.sum(row, d) = static_cast<float>(sum[d]);
    }
    const double r = inverse_rms(sum, p.eps);
    for (std::size_t d = 0; d < sum.size(); ++d) p.y(row, d) = round_to<T>(sum[d] * r * p.weight(d));
  }
}

template <class T>
void add_rms_norm(const AddRmsNormBackward<T>& p) {
  const std::int64_t columns = p.sum.extent[1];
  std::vector<double> sum(static_cast<std::size_t>(columns)), dweight(sum.size());
  for (std::int64_t row = 0; row < p.sum.extent[0]; ++row) {
    for (std::size_t d = 0; d < sum.size(); ++d) sum[d] = p.sum(row, d);
    const double r = inverse_rms(sum, p.eps);
    double mean = 0;  // of weight·dy·sum
    for (std::size_t d = 0; d < sum.size(); ++d) {
      const double dy = to_float(p.dy(row, d));
      dweight[d] += dy * sum[d] * r;
      mean += p.weight(d) * dy * sum[d] / static_cast<double>(columns);
    }
    for (std::size_t d = 0; d < sum.size(); ++d) {
      const double through = r * (p.weight(d) * to_float(p.dy(row, d)) - sum[d] * r * r * mean);
      const double dx = through + (p.dsum ? double{p.dsum(row, d)} : 0.0);
      p.dx(row, d) = static_cast<float>(dx);
      if (p.dbranch) p.dbranch(row, d) = round_to<T>(dx);
    }
  }
  for (std::size_t d = 0; d < dweight.size(); ++d) p.dweight(d) = static_cast<float>(dweight[d]);
}

template void add_rms_norm(const AddRmsNormForward<float>&);
template void add_rms_norm(const AddRmsNormForward<bfloat16>&);
template void add_rms_norm(const AddRmsNormBackward<float>&);
template void add_rms_norm(const AddRmsNormBackward<bfloat16>&);

}  // namespace efla::ref
