#include "efla/ref/short_conv.h"

#include <cmath>
#include <vector>

#include "efla/ref/elementwise.h"

namespace efla::ref {
namespace {

struct Tokens {
  std::int64_t i_b, begin, end;
};

// Returns the place of every sequence.
template <class Problem>
std::vector<Tokens> sequences_of(const Problem& p) {
  std::vector<Tokens> all;
  if (p.cu_seqlens) {
    for (std::int64_t n = 0; n + 1 < p.cu_seqlens.extent[0]; ++n)
      all.push_back({0, p.cu_seqlens(n), p.cu_seqlens(n + 1)});
  } else {
    for (std::int64_t i_b = 0; i_b < p.x.extent[0]; ++i_b) all.push_back({i_b, 0, p.x.extent[1]});
  }
  return all;
}

// Returns a[t, d] = Σ_j weight[d, j] · x[t − (W−1) + j, d].
template <class Problem>
double weighted_sum(const Problem& p, const Tokens& at, std::int64_t t, std::int64_t d) {
  const std::int64_t width = p.weight.extent[1];
  double a = 0;
  for (std::int64_t j = 0; j < width; ++j) {
    const std::int64_t from = t - (width - 1) + j;
    if (from >= at.begin) a += p.weight(d, j) * static_cast<double>(to_float(p.x(at.i_b, from, d)));
  }
  return a;
}

}  // namespace

template <class T>
void short_conv(const ShortConvForward<T>& p) {
  for (const Tokens& at : sequences_of(p)) {
    for (std::int64_t t = at.begin; t < at.end; ++t) {
      for (std::int64_t d = 0; d < p.x.extent[2]; ++d) {
        const double a = weighted_sum(p, at, t, d);
        p.y(at.i_b, t, d) = round_to<T>(a * sigmoid(a));
      }
    }
  }
}

template <class T>
void short_conv(const ShortConvBackward<T>& p) {
  const std::int64_t width = p.weight.extent[1];
  for (std::int64_t d = 0; d < p.x.extent[2]; ++d) {
    std::vector<double> dweight(static_cast<std::size_t>(width));
    for (const Tokens& at : sequences_of(p)) {
      std::vector<double> dx(static_cast<std::size_t>(at.end - at.begin));
      for (std::int64_t t = at.begin; t < at.end; ++t) {
        const double a = weighted_sum(p, at, t, d), sigma = sigmoid(a);
        const double da = to_float(p.dy(at.i_b, t, d)) * sigma * (1 + a * (1 - sigma));  // silu'(a) = σ (1 + a (1 − σ))
        for (std::int64_t j = 0; j < width; ++j) {
          const std::int64_t from = t - (width - 1) + j;
          if (from < at.begin) continue;
          dx[static_cast<std::size_t>(from - at.begin)] += p.weight(d, j) * da;
          dweight[static_cast<std::size_t>(j)] += to_float(p.x(at.i_b, from, d)) * da;
        }
      }
      for (std::int64_t t = at.begin; t < at.end; ++t) {
        p.dx(at.i_b, t, d) = round_to<T>(dx[static_cast<std::size_t>(t - at.begin)]);
      }
    }
    for (std::int64_t j = 0; j < width; ++j) p.dweight(d, j) = static_cast<float>(dweight[static_cast<std::size_t>(j)]);
  }
}

template void short_conv(const ShortConvForward<float>&);
template void short_conv(const ShortConvForward<bfloat16>&);
template void short_conv(const ShortConvBackward<float>&);
template void short_conv(const ShortConvBackward<bfloat16>&);

}  // namespace efla::ref
