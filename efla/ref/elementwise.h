// Functions of one number that several references use.
#pragma once

#include <cmath>

#include "efla/base/dtype.h"

namespace efla::ref {

// Rounds a float64 to T once (through float32 for bfloat16).
template <class T>
T round_to(double x) {
  return from_state<T>(static_cast<State<T>>(x));
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace efla::ref
