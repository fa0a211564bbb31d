#pragma once

namespace efla {

// The function that computes the decay g from its projection z, per head or per key channel. rate is positive.
enum class DecayActivation {
  softplus,  // g = −rate · softplus(z + bias)
  sigmoid    // g = bound · sigmoid(rate · (z + bias))
};

// The largest logarithm of a rate whose exponential is used as a factor. exp(a_log) would overflow soon above, and its
// product with a softplus, a σ or an x that is 0 would be NaN. docs/ops/decay_gate.md describes the limit.
template <class Real>
inline constexpr Real kLargestLogRate = sizeof(Real) == sizeof(float) ? Real{60} : Real{600};

// Returns the part of a_log whose exponential is the rate. NaN stays NaN.
template <class Real>
constexpr Real factor_log_rate(Real a_log) {
  constexpr Real kLargest = kLargestLogRate<Real>;
  return a_log > kLargest ? kLargest : a_log;
}

// Returns the rest of a_log, which is added to the argument of softplus, because softplus(x) approaches e^x where x is
// negative. For larger x, g is so far below 0 with and without the rest that e^g is 0. A σ needs no rest: it is at its
// limits wherever x is not almost 0.
template <class Real>
constexpr Real rest_of_log_rate(Real a_log, DecayActivation activation) {
  constexpr Real kLargest = kLargestLogRate<Real>;
  return activation == DecayActivation::softplus && a_log > kLargest ? a_log - kLargest : Real{0};
}

}  // namespace efla
