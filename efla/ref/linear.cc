#include "efla/ref/linear.h"

namespace efla::ref {

void linear(const LinearForward& p) {
  for (std::int64_t m = 0; m < p.x.extent[0]; ++m) {
    for (std::int64_t n = 0; n < p.outputs(); ++n) {
      double sum = 0;
      for (std::int64_t d = 0; d < p.x.extent[1]; ++d) sum += static_cast<double>(p.x(m, d)) * p.weight_at(n, d);
      p.y(m, n) = static_cast<float>(sum);
    }
  }
}

}  // namespace efla::ref
