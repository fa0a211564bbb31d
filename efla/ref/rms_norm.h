// RMS normalisation in float64, one element after the other.
#pragma once

#include "efla/rule/rms_norm.h"

namespace efla::ref {

// Computes y and rounds it once. T is float or bfloat16.
template <class T>
void rms_norm(const RmsNormForward<T>& problem);

// Computes dx and dweight and rounds them once.
template <class T>
void rms_norm(const RmsNormBackward<T>& problem);

}  // namespace efla::ref
