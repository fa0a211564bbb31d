#pragma once

namespace efla {

// The function that computes the decay g from its projection z, per head or per key channel. rate is positive.
enum class DecayActivation {
  softplus,  // g = −rate · softplus(z + bias)
  sigmoid    // g = bound · sigmoid(rate · (z + bias))
};

}  // namespace efla
