// The decay gate in float64, one element after the other. rule/decay_gate.h has the equations.
#pragma once

#include "efla/rule/decay_gate.h"

namespace efla::ref {

template <class T>
void decay_gate(const DecayGateForward<T>& problem);
template <class T>
void decay_gate(const DecayGateBackward<T>& problem);

}  // namespace efla::ref
