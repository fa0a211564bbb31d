// The contract of SwiGLU (arXiv 2002.05202), the product in the middle of an MLP.
#pragma once

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla {

// y = silu(gate) · up with silu(a) = a σ(a), element by element. T is float or bfloat16.
template <class T>
struct SwigluForward {
  View<const T, 2> gate, up;  // [N, D]
  View<T, 2> y;               // [N, D]
};

// dgate = dy · up · σ(gate) (1 + gate (1 − σ(gate))),  dup = dy · silu(gate)
template <class T>
struct SwigluBackward {
  View<const T, 2> gate, up, dy;  // [N, D]
  View<T, 2> dgate, dup;          // [N, D]
  View<T, 2> y = {};              // [N, D], optional: the forward's result, computed again
};

// Throws Error as validate of rule/validate.h does.
template <class T>
void validate(const SwigluForward<T>& problem);
template <class T>
void validate(const SwigluBackward<T>& problem);

}  // namespace efla
