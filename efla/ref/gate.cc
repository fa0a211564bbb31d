#include "efla/ref/gate.h"

#include "efla/ref/elementwise.h"

namespace efla::ref {

void gate(const GateForward& p) {
  for (std::int64_t n = 0; n < p.x.extent[0]; ++n) {
    for (std::int64_t d = 0; d < p.x.extent[1]; ++d) {
      const double z = p.gate(n, d), sigma = sigmoid(z);
      p.y(n, d) = static_cast<float>(p.x(n, d) * (p.activation == GateActivation::silu ? z * sigma : sigma));
    }
  }
}

}  // namespace efla::ref
