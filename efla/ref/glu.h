// The gated linear unit in float64, one element after the other. rule/glu.h has the equations.
#pragma once

#include "efla/rule/glu.h"

namespace efla::ref {

template <class T>
void glu(const GluForward<T>& problem);
template <class T>
void glu(const GluBackward<T>& problem);

}  // namespace efla::ref
