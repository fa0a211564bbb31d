// The contract of a gated product, as in a gated MLP.
#pragma once

#include "efla/base/view.h"
#include "efla/rule/rms_norm.h"

namespace efla {

// y[n, d] = x[n, d] · act(gate[n, d]). y may be x or gate.
struct GateForward {
  View<const float, 2> x;     // [N, D]
  View<const float, 2> gate;  // [N, D]
  GateActivation activation = GateActivation::silu;
  View<float, 2> y;  // [N, D]
};

// Throws Error as validate of rule/validate.h does.
void validate(const GateForward& problem);

}  // namespace efla
