#include "efla/ref/decay_gate.h"

#include <cmath>
#include <vector>

#include "efla/ref/elementwise.h"

namespace efla::ref {
namespace {

// The decay of an element and its derivatives with respect to x = z + bias and to a_log.
struct GatedDecay {
  double value, by_x, by_a_log;
};

template <class Problem>
GatedDecay decay_at(const Problem& p, std::int64_t row, std::int64_t column) {
  const std::int64_t head = column / (p.z.extent[1] / p.a_log.extent[0]);
  const double a_log = p.a_log(head), rate = std::exp(factor_log_rate(a_log));
  const double x =
      static_cast<double>(to_float(p.z(row, column))) + p.bias(column) + rest_of_log_rate(a_log, p.activation);
  const bool softplus = p.activation == DecayActivation::softplus;
  const double y = softplus ? x : rate * x, e = std::exp(-std::abs(y)), sigma = (y >= 0 ? 1 : e) / (1 + e);
  if (softplus) {
    const double g = -rate * (std::fmax(x, 0) + std::log1p(e));
    return {g, -rate * sigma, g};
  }
  const double slope = p.bound * rate * e / ((1 + e) * (1 + e));
  return {p.bound * sigma, slope, slope * x};
}

}  // namespace

template <class T>
void decay_gate(const DecayGateForward<T>& p) {
  for (std::int64_t row = 0; row < p.z.extent[0]; ++row) {
    for (std::int64_t d = 0; d < p.z.extent[1]; ++d) p.g(row, d) = static_cast<float>(decay_at(p, row, d).value);
  }
}

template <class T>
void decay_gate(const DecayGateBackward<T>& p) {
  const std::int64_t columns = p.z.extent[1], heads = p.a_log.extent[0];
  std::vector<double> dbias(static_cast<std::size_t>(columns)), da_log(static_cast<std::size_t>(heads));
  for (std::int64_t row = 0; row < p.z.extent[0]; ++row) {
    for (std::int64_t d = 0; d < columns; ++d) {
      const GatedDecay g = decay_at(p, row, d);
      const double dg = p.dg(row, d);
      dbias[static_cast<std::size_t>(d)] += g.by_x * dg;
      da_log[static_cast<std::size_t>(d / (columns / heads))] += g.by_a_log * dg;
      p.dz(row, d) = round_to<T>(g.by_x * dg);
    }
  }
  for (std::int64_t d = 0; d < columns; ++d) p.dbias(d) = static_cast<float>(dbias[static_cast<std::size_t>(d)]);
  for (std::int64_t h = 0; h < heads; ++h) p.da_log(h) = static_cast<float>(da_log[static_cast<std::size_t>(h)]);
}

template void decay_gate(const DecayGateForward<float>&);
template void decay_gate(const DecayGateForward<bfloat16>&);
template void decay_gate(const DecayGateBackward<float>&);
template void decay_gate(const DecayGateBackward<bfloat16>&);

}  // namespace efla::ref
