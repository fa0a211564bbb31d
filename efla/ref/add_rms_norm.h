// The step between two branches of a residual network in float64, one element after the other.
#pragma once

#include "efla/rule/add_rms_norm.h"

namespace efla::ref {

// Computes sum and y (rule/add_rms_norm.h) and then rounds them.
template <class T>
void add_rms_norm(const AddRmsNormForward<T>& problem);

// Computes dx, dbranch and dweight and then rounds them.
template <class T>
void add_rms_norm(const AddRmsNormBackward<T>& problem);

}  // namespace efla::ref
