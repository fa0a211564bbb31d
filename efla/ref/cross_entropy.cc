#include "efla/ref/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "efla/ref/elementwise.h"

namespace efla::ref {

template <class T>
void cross_entropy(const CrossEntropy<T>& p) {
  const std::int64_t columns = p.logits.extent[1];
  for (std::int64_t n = 0; n < p.logits.extent[0]; ++n) {
    const std::int64_t target = p.targets(n);
    const bool counts = target != kIgnoreIndex;
    double largest = -INFINITY, sum = 0;
    for (std::int64_t v = 0; v < columns; ++v) largest = std::max(largest, double{to_float(p.logits(n, v))});
    for (std::int64_t v = 0; v < columns; ++v) sum += std::exp(to_float(p.logits(n, v)) - largest);
    p.loss(n) = counts ? static_cast<float>(std::log(sum) + largest - to_float(p.logits(n, target))) : 0.0F;
    if (!p.share) continue;
    for (std::int64_t v = 0; v < columns; ++v) {
      const double probability = std::exp(to_float(p.logits(n, v)) - largest) / sum;
      p.logits(n, v) = round_to<T>(counts ? p.share(0) * (probability - (v == target ? 1 : 0)) : 0);
    }
  }
}

template void cross_entropy(const CrossEntropy<float>&);
template void cross_entropy(const CrossEntropy<bfloat16>&);

}  // namespace efla::ref
