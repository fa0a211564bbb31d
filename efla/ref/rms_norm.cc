#include "efla/ref/rms_norm.h"

#include <cmath>
#include <vector>

#include "efla/ref/elementwise.h"

namespace efla::ref {
namespace {

// Returns 1/√(mean(x²) + eps) of a row.
template <class Problem>
double inverse_rms(const Problem& p, std::int64_t row) {
  double squares = 0;
  for (std::int64_t d = 0; d < p.x.extent[1]; ++d) {
    const double x = to_float(p.x(row, d));
    squares += x * x;
  }
  return 1 / std::sqrt(squares / static_cast<double>(p.x.extent[1]) + p.eps);
}

template <class Problem>
double weight_at(const Problem& p, std::int64_t d) {
  return p.weight ? p.weight(d) : 1.0;
}

// Returns act(gate) of an element and the derivative; 1 and 0 without a gate.
template <class Problem>
Activated gate_at(const Problem& p, std::int64_t row, std::int64_t d) {
  return p.gate ? activate(p.activation, to_float(p.gate(row, d))) : Activated{1, 0};
}

}  // namespace

template <class T>
void rms_norm(const RmsNormForward<T>& p) {
  for (std::int64_t row = 0; row < p.x.extent[0]; ++row) {
    const double r = inverse_rms(p, row);
    for (std::int64_t d = 0; d < p.x.extent[1]; ++d) {
      p.y(row, d) = round_to<T>(to_float(p.x(row, d)) * r * weight_at(p, d) * gate_at(p, row, d).value);
    }
  }
}

template <class T>
void rms_norm(const RmsNormBackward<T>& p) {
  const std::int64_t columns = p.x.extent[1];
  std::vector<double> dweight(static_cast<std::size_t>(columns));
  for (std::int64_t row = 0; row < p.x.extent[0]; ++row) {
    const double r = inverse_rms(p, row);
    double mean = 0;  // of weight·du·x
    std::vector<double> du(static_cast<std::size_t>(columns));
    for (std::int64_t d = 0; d < columns; ++d) {
      const auto i = static_cast<std::size_t>(d);
      const double x = to_float(p.x(row, d)), dy = to_float(p.dy(row, d));
      const Activated gate = gate_at(p, row, d);
      du[i] = dy * gate.value;
      dweight[i] += du[i] * x * r;
      mean += weight_at(p, d) * du[i] * x / static_cast<double>(columns);
      if (p.gate) p.dgate(row, d) = round_to<T>(dy * x * r * weight_at(p, d) * gate.slope);
    }
    for (std::int64_t d = 0; d < columns; ++d) {
      p.dx(row, d) =
          round_to<T>(r * (weight_at(p, d) * du[static_cast<std::size_t>(d)] - to_float(p.x(row, d)) * r * r * mean));
    }
  }
  if (!p.dweight) return;
  for (std::int64_t d = 0; d < columns; ++d) p.dweight(d) = static_cast<float>(dweight[static_cast<std::size_t>(d)]);
}

template void rms_norm(const RmsNormForward<float>&);
template void rms_norm(const RmsNormForward<bfloat16>&);
template void rms_norm(const RmsNormBackward<float>&);
template void rms_norm(const RmsNormBackward<bfloat16>&);

}  // namespace efla::ref
