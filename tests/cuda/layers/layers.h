// What the tests of the layers on a GPU share.
#pragma once

#include <cstdint>

#include "efla/rule/gate_activation.h"
#include "tests/cuda/device.h"

namespace efla::test {

template <class T>
double tolerance() {
  return sizeof(T) == sizeof(bfloat16) ? 3e-3 : 2e-6;
}
inline constexpr double kSumTolerance = 2e-6;  // of sums over rows, in float32 for every T

template <class T, int Rank>
void randomise(Tensor<T, Rank>& tensor, Random& random) {
  tensor.assign(drawn(tensor.view().size(), [&] { return random.normal(); }));
}

inline constexpr GateActivation kActivations[]{GateActivation::silu, GateActivation::sigmoid};
inline const char* activation_name(GateActivation activation) {
  return activation == GateActivation::silu ? "silu" : "sigmoid";
}

}  // namespace efla::test
