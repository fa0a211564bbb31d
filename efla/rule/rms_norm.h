// The contract of root-mean-square normalisation (Zhang and Sennrich, "Root mean square layer normalization", 2019,
// arXiv 1910.07467). docs/ops/rms_norm.md describes the operator.
#pragma once

#include "efla/base/dtype.h"
#include "efla/base/view.h"
#include "efla/rule/gate_activation.h"

namespace efla {

// y = x · r · weight · act(gate) with r = 1/√(mean(x²) + eps), row by row; act is in gate_activation.h. y may be x. T
// is float or bfloat16.
template <class T>
struct RmsNormForward {
  View<const T, 2> x;           // [N, D]
  View<const float, 1> weight;  // [D], optional; absent: ones
  float eps = 1e-6F;
  View<T, 2> y;                // [N, D]
  View<const T, 2> gate = {};  // [N, D], optional; absent: without act(gate)
  GateActivation activation = GateActivation::silu;
};

// The gradients of a loss whose gradient with respect to y is dy. r is computed again.
//   dx = r (weight·du − x r² mean(weight·du·x)),    dweight = Σ_rows du·x·r,    du = dy·act(gate)
//   dgate = dy·x·r·weight·act′(gate)
template <class T>
struct RmsNormBackward {
  View<const T, 2> x;           // [N, D]
  View<const float, 1> weight;  // [D], optional; absent: ones
  float eps = 1e-6F;
  View<const T, 2> dy;     // [N, D]
  View<T, 2> dx;           // [N, D], may be dy
  View<float, 1> dweight;  // [D], optional
  View<const T, 2> gate = {};
  GateActivation activation = GateActivation::silu;
  View<T, 2> dgate = {};  // [N, D], as gate
};

// Throws Error as validate of rule/validate.h does.
template <class T>
void validate(const RmsNormForward<T>& problem);
template <class T>
void validate(const RmsNormBackward<T>& problem);

}  // namespace efla
