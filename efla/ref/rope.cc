#include "efla/ref/rope.h"

#include <cmath>

namespace efla::ref {

void rope(const RopeForward& p) {
  const std::int64_t half = p.rotary / 2;
  for (std::int64_t n = 0; n < p.x.extent[0]; ++n) {
    for (std::int64_t h = 0; h < p.x.extent[1]; ++h) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(p.positions(n)) * p.frequency(i);
        const double a = p.x(n, h, i), b = p.x(n, h, i + half);
        p.y(n, h, i) = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
        p.y(n, h, i + half) = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
      }
      for (std::int64_t i = p.rotary; i < p.x.extent[2]; ++i) p.y(n, h, i) = p.x(n, h, i);
    }
  }
}

}  // namespace efla::ref
