// RMS normalisation in float64, one element after the other.
#pragma once

#include "efla/rule/rms_norm.h"

namespace efla::ref {

// Computes y (rule/rms_norm.h) and then rounds it. T is float or bfloat16.
template <class T>
void rms_norm(const RmsNormForward<T>& problem);

// Computes dx, dweight and dgate and then rounds them.
template <class T>
void rms_norm(const RmsNormBackward<T>& problem);

}  // namespace efla::ref
