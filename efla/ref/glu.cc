#include "efla/ref/glu.h"

#include "efla/ref/elementwise.h"

namespace efla::ref {

template <class T>
void glu(const GluForward<T>& p) {
  for (std::int64_t row = 0; row < p.gate.extent[0]; ++row) {
    for (std::int64_t d = 0; d < p.gate.extent[1]; ++d) {
      const double up = to_float(p.up(row, d));
      p.y(row, d) = round_to<T>(activate(p.activation, to_float(p.gate(row, d))).value * up);
    }
  }
}

template <class T>
void glu(const GluBackward<T>& p) {
  for (std::int64_t row = 0; row < p.gate.extent[0]; ++row) {
    for (std::int64_t d = 0; d < p.gate.extent[1]; ++d) {
      const double up = to_float(p.up(row, d)), dy = to_float(p.dy(row, d));
      const Activated act = activate(p.activation, to_float(p.gate(row, d)));
      p.dgate(row, d) = round_to<T>(dy * up * act.slope);
      p.dup(row, d) = round_to<T>(dy * act.value);
      if (p.y) p.y(row, d) = round_to<T>(act.value * up);
    }
  }
}

template void glu(const GluForward<float>&);
template void glu(const GluForward<bfloat16>&);
template void glu(const GluBackward<float>&);
template void glu(const GluBackward<bfloat16>&);

}  // namespace efla::ref
