#pragma once

namespace efla {

// What the decay g is computed from its projection z with, per head or per key channel. rate is positive.
enum class DecayActivation {
  softplus,  // g = −rate · softplus(z + bias)
  sigmoid    // g = bound · sigmoid(rate · (z + bias))
};

}  // namespace efla
