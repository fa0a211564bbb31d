// The contract of a gated linear unit (Shazeer, "GLU variants improve transformer", arXiv 2002.05202): the product in
// the middle of an MLP, and the product of a mixer's output with its gate. With silu it is SwiGLU. docs/ops/glu.md
// describes the operator.
#pragma once

#include "efla/base/dtype.h"
#include "efla/base/view.h"
#include "efla/rule/gate_activation.h"

namespace efla {

// y = act(gate) · up, element by element (gate_activation.h). y may be gate or up. T is float or bfloat16.
template <class T>
struct GluForward {
  View<const T, 2> gate, up;  // [N, D]
  View<T, 2> y;               // [N, D]
  GateActivation activation = GateActivation::silu;
};

// The gradients of a loss whose gradient with respect to y is dy:
//   dgate = dy · up · act′(gate),  dup = dy · act(gate)
template <class T>
struct GluBackward {
  View<const T, 2> gate, up, dy;  // [N, D]
  View<T, 2> dgate, dup;          // [N, D]
  View<T, 2> y = {};              // [N, D], optional: the forward's result, computed again
  GateActivation activation = GateActivation::silu;
};

// Throws Error as validate of rule/validate.h does.
template <class T>
void validate(const GluForward<T>& problem);
template <class T>
void validate(const GluBackward<T>& problem);

}  // namespace efla
