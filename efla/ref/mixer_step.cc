#include "efla/ref/mixer_step.h"

#include <cmath>
#include <vector>

#include "efla/ref/elementwise.h"

namespace efla::ref {
namespace {

using Vector = std::vector<double>;

// Returns the activated outputs of the convolution and moves the history on by one row.
Vector convolve(const MixerStep& p, std::int64_t i_b, std::int64_t slot) {
  const std::int64_t width = p.taps.extent[1];
  Vector u;
  for (std::int64_t c = 0; c < p.channels(); ++c) {
    const auto x = [&](std::int64_t j) { return j + 1 < width ? p.history(slot, j, c) : p.qkv(i_b, c); };
    double sum = 0;
    for (std::int64_t j = 0; j < width; ++j) sum += static_cast<double>(p.taps(c, j)) * x(j);
    u.push_back(sum * sigmoid(sum));
    for (std::int64_t j = 0; j + 1 < width; ++j) p.history(slot, j, c) = x(j + 1);
  }
  return u;
}

void l2_normalise(double* x, std::int64_t count) {
  double squares = 0;
  for (std::int64_t i = 0; i < count; ++i) squares += x[i] * x[i];
  for (std::int64_t i = 0; i < count; ++i) x[i] /= std::sqrt(squares + kL2NormEpsilon);
}

double beta_of(const MixerStep& p, std::int64_t i_b, std::int64_t h) {
  const double factor = p.beta_factor(h);
  if (p.beta_activation == BetaActivation::one) return factor;
  const double b = p.beta(i_b, h);
  return factor * (p.beta_activation == BetaActivation::sigmoid ? sigmoid(b) : softplus(b));
}

// Returns e^g of a key channel.
double decay_of(const MixerStep& p, std::int64_t i_b, std::int64_t h, std::int64_t key) {
  if (p.rule.decay == Decay::none) return 1;
  const std::int64_t at = p.rule.decay == Decay::channel ? h * p.shape.key_dim + key : h;
  const double rate = p.rate(h), z = static_cast<double>(p.decay(i_b, at)) + p.decay_bias(at);
  return std::exp(p.decay_activation == DecayActivation::sigmoid ? p.bound * sigmoid(rate * z) : -rate * softplus(z));
}

// Computes the delta rule of a value head and updates its state. Returns its output [V].
Vector recur(const MixerStep& p, std::int64_t i_b, std::int64_t slot, std::int64_t h, const double* q, const double* k,
             const double* v) {
  const std::int64_t key_dim = p.shape.key_dim, value_dim = p.shape.value_dim;
  double lambda = 0;
  for (std::int64_t i = 0; i < key_dim; ++i) lambda += k[i] * k[i];
  const double alpha = gain_alpha(p.rule.step, beta_of(p, i_b, h), lambda);
  Vector o;
  for (std::int64_t j = 0; j < value_dim; ++j) {
    Vector column;
    double error = 0;
    for (std::int64_t i = 0; i < key_dim; ++i) {
      column.push_back(decay_of(p, i_b, h, i) * p.states(slot, h, i, j));
      error += column.back() * k[i];
    }
    const double u = p.rule.step.write_scale * alpha * v[j] - p.rule.step.erase_scale * alpha * error;
    double sum = 0;
    for (std::int64_t i = 0; i < key_dim; ++i) {
      const double s = column[static_cast<std::size_t>(i)] + k[i] * u;
      p.states(slot, h, i, j) = static_cast<float>(s);
      sum += s * q[i];
    }
    o.push_back(p.rule.scale_for(key_dim) * sum);
  }
  return o;
}

// Writes a value head's output after norm and gate.
void write_output(const MixerStep& p, std::int64_t i_b, std::int64_t h, const Vector& o) {
  const std::int64_t value_dim = p.shape.value_dim;
  double squares = 0;
  for (const double x : o) squares += x * x;
  const double r = 1 / std::sqrt(squares / static_cast<double>(value_dim) + p.norm_eps);
  for (std::int64_t j = 0; j < value_dim; ++j) {
    const std::int64_t at = h * value_dim + j;
    double y = o[static_cast<std::size_t>(j)];
    if (p.norm_weight) y *= r * p.norm_weight(j);
    if (p.gate) {
      const double z = static_cast<double>(p.gate(i_b, at)) + (p.gate_bias ? p.gate_bias(at) : 0.0);
      y *= p.gate_activation == GateActivation::silu ? z * sigmoid(z) : sigmoid(z);
    }
    p.o(i_b, at) = static_cast<float>(y);
  }
}

}  // namespace

void mixer_step(const MixerStep& p) {
  const auto& s = p.shape;
  for (std::int64_t i_b = 0; i_b < s.batch; ++i_b) {
    const std::int64_t slot = p.slots ? p.slots(i_b) : i_b;
    if (slot < 0) {
      for (std::int64_t c = 0; c < p.o.extent[1]; ++c) p.o(i_b, c) = 0;
      continue;
    }
    Vector u = convolve(p, i_b, slot);
    double* const q = u.data();
    double* const k = q + s.heads * s.key_dim;
    double* const v = k + s.heads * s.key_dim;
    for (std::int64_t h = 0; h < 2 * s.heads && p.rule.qk_l2norm; ++h) l2_normalise(q + h * s.key_dim, s.key_dim);
    for (std::int64_t h = 0; h < s.value_heads; ++h) {
      const std::int64_t from = h / s.group() * s.key_dim;
      write_output(p, i_b, h, recur(p, i_b, slot, h, q + from, k + from, v + h * s.value_dim));
    }
  }
}

}  // namespace efla::ref
