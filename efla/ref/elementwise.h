// Functions of one number that several references use.
#pragma once

#include "efla/base/dtype.h"
#include "efla/rule/activation.h"
#include "efla/rule/gate_activation.h"

namespace efla::ref {

// Rounds a float64 to T. To bfloat16 and float16 it rounds twice, because the number is first rounded to float32.
template <class T>
T round_to(double x) {
  return from_state<T>(static_cast<State<T>>(x));
}

// The value act(z) of a gate z (rule/gate_activation.h), and the derivative.
struct Activated {
  double value, slope;
};
inline Activated activate(GateActivation activation, double z) {
  const double sigma = sigmoid(z);
  if (activation == GateActivation::sigmoid) return {sigma, sigma * (1 - sigma)};
  return {z * sigma, sigma * (1 + z * (1 - sigma))};
}

}  // namespace efla::ref
