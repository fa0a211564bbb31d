// SwiGLU in float64.
#pragma once

#include "efla/rule/swiglu.h"

namespace efla::ref {

template <class T>
void swiglu(const SwigluForward<T>& problem);
template <class T>
void swiglu(const SwigluBackward<T>& problem);

}  // namespace efla::ref
