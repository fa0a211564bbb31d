#include "efla/ref/swiglu.h"

#include "efla/ref/elementwise.h"

namespace efla::ref {

template <class T>
void swiglu(const SwigluForward<T>& p) {
  for (std::int64_t row = 0; row < p.gate.extent[0]; ++row) {
    for (std::int64_t d = 0; d < p.gate.extent[1]; ++d) {
      const double gate = to_float(p.gate(row, d)), up = to_float(p.up(row, d));
      p.y(row, d) = round_to<T>(gate * sigmoid(gate) * up);
    }
  }
}

template <class T>
void swiglu(const SwigluBackward<T>& p) {
  for (std::int64_t row = 0; row < p.gate.extent[0]; ++row) {
    for (std::int64_t d = 0; d < p.gate.extent[1]; ++d) {
      const double gate = to_float(p.gate(row, d)), up = to_float(p.up(row, d)), dy = to_float(p.dy(row, d));
      const double s = sigmoid(gate);
      p.dgate(row, d) = round_to<T>(dy * up * s * (1 + gate * (1 - s)));
      p.dup(row, d) = round_to<T>(dy * gate * s);
      if (p.y) p.y(row, d) = round_to<T>(gate * s * up);
    }
  }
}

template void swiglu(const SwigluForward<float>&);
template void swiglu(const SwigluForward<bfloat16>&);
template void swiglu(const SwigluBackward<float>&);
template void swiglu(const SwigluBackward<bfloat16>&);

}  // namespace efla::ref
