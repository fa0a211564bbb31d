// The inputs of one token of the recurrence, widened to float64: q, the keys, v, the decay and the gains.
#pragma once

#include <cmath>
#include <vector>

#include "efla/rule/micro_steps.h"

namespace efla::ref {

// Divides x by √(Σx² + ε) if `on`. Returns the factor 1/√(Σx² + ε), or 1 if not `on`.
inline double l2_normalise(std::vector<double>& x, bool on) {
  if (!on) return 1.0;
  double sum = kL2NormEpsilon;
  for (const double e : x) sum += e * e;
  const double factor = 1.0 / std::sqrt(sum);
  for (double& e : x) e *= factor;
  return factor;
}

struct Token {
  std::vector<double> q, k, v;        // q and k after the L2 norm if the rule has one; q is not scaled yet
  std::vector<double> erase_key;      // κ, times the factor that the L2 norm has for k; k if the rule has one key
  double q_factor = 1, k_factor = 1;  // factors of the L2 norm
  double beta = 0, lambda = 0;        // λ = ‖k‖²; with two keys μ = κᵀk
  Gain<double> gain{};                // α and its derivatives
  double a = 0, b = 0;                // erase and write gains
  std::vector<double> decay;          // [K] the diagonal of D, e^g
};

// Reads token t, a step where tokens have several, of batch entry i_b and value head i_h from a forward or a backward
// problem. Without a read-out after the step q is zeros.
template <class Problem>
Token read_token(const Problem& p, std::int64_t i_b, std::int64_t t, std::int64_t i_h) {
  Token token;
  const std::int64_t i_q = i_h / p.shape.group();
  const MicroSteps steps{steps_per_token(p)};
  const std::int64_t row = steps.token(t);
  for (std::int64_t i = 0; i < p.shape.key_dim; ++i) {
    token.q.push_back(steps.is_read(t) ? to_float(p.q(i_b, row, i_q, i)) : 0.0);
    token.k.push_back(to_float(p.k(i_b, t, i_q, i)));
    const std::int64_t channel = p.rule.decay == Decay::channel ? i : 0;
    const bool decays = p.g && steps.decays(t);
    token.decay.push_back(decays ? std::exp(static_cast<double>(p.g(i_b, row, i_h, channel))) : 1.0);
  }
  for (std::int64_t j = 0; j < p.shape.value_dim; ++j) token.v.push_back(to_float(p.v(i_b, t, i_h, j)));
  token.q_factor = l2_normalise(token.q, p.rule.qk_l2norm);
  token.k_factor = l2_normalise(token.k, p.rule.qk_l2norm);
  token.erase_key = token.k;
  for (std::int64_t i = 0; p.rule.two_keys && i < p.shape.key_dim; ++i) {
    token.erase_key[i] = token.k_factor * to_float(p.erase_key(i_b, t, i_q, i));
  }
  for (std::int64_t i = 0; i < p.shape.key_dim; ++i) token.lambda += token.erase_key[i] * token.k[i];
  token.beta = to_float(p.beta(i_b, t, i_h));
  token.gain = p.rule.two_keys ? two_key_gain<double>(p.rule.step, token.beta, token.lambda)
                               : gain<double>(p.rule.step, token.beta, token.lambda);
  token.a = p.rule.step.erase_scale * token.gain.alpha;
  token.b = p.rule.step.write_scale * token.gain.alpha;
  return token;
}

}  // namespace efla::ref
