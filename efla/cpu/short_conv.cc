// The short convolution on vector units, forward and backward (docs/ops/short_conv.md). A task of the forward has a
// strip of channels of one sequence, a task of the backward a strip of channels of all sequences, because dweight sums
// over the sequences.
#include "efla/cpu/short_conv.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/short_conv.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "efla/cpu/common/element-inl.h"
#include "efla/cpu/common/sigmoid-inl.h"
#include "hwy/highway.h"

#ifndef EFLA_CPU_SHORT_CONV_ONCE_
#define EFLA_CPU_SHORT_CONV_ONCE_
namespace efla::cpu {

// Channels per task. Tokens are the outer loop and channels the inner loop, so that memory is read in its order. The
// rows that a task keeps (weights, their gradient, the last gradients of the sums) stay in the first-level cache.
inline constexpr std::int64_t kStrip = 256;

inline std::int64_t strips(std::int64_t channels) { return (channels + kStrip - 1) / kStrip; }

// One row of a strip's channels for each tap.
struct Taps {
  alignas(64) float row[kMaxConvWidth][kStrip] = {};
};

}  // namespace efla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// Returns the weights of `count` channels from `first` on.
inline Taps taps_of(const View<const float, 2>& weight, std::int64_t first, std::int64_t count) {
  Taps taps;
  for (std::int64_t j = 0; j < weight.extent[1]; ++j) {
    for (std::int64_t c = 0; c < count; ++c) taps.row[j][c] = weight(first + c, j);
  }
  return taps;
}

// The rows t−(W−1) … t of a strip, oldest first; zeros before the first token.
template <class T>
struct Window {
  const T* row[kMaxConvWidth];

  Window(const View<const T, 3>& x, std::int64_t i_b, std::int64_t t, std::int64_t first, std::int64_t width) {
    alignas(64) static constexpr T kZeros[kStrip] = {};
    for (std::int64_t j = 0; j < width; ++j) {
      const std::int64_t from = t - (width - 1) + j;
      row[j] = from >= 0 ? x.at(i_b, from, first) : kZeros;
    }
  }
};

// Returns Σ_j weight[j]·x[t−(W−1)+j] for the vector of channels at c.
template <class D, class T>
HWY_INLINE hn::Vec<D> weighted_sum(D d, const Taps& weight, const Window<T>& x, std::size_t c, std::int64_t width) {
  auto a = hn::Mul(hn::LoadU(d, weight.row[0] + c), load(d, x.row[0] + c));
  for (std::int64_t j = 1; j < width; ++j) {
    a = hn::MulAdd(hn::LoadU(d, weight.row[j] + c), load(d, x.row[j] + c), a);
  }
  return a;
}

// Computes the forward of a strip. W is the number of taps, or 0 if it is only known at run time.
template <int W, class T>
void forward_strip(const ShortConvForward<T>& p, std::int64_t i_b, std::int64_t first, std::int64_t count) {
  const std::int64_t width = W > 0 ? W : p.weight.extent[1];
  const Taps weight = taps_of(p.weight, first, count);
  for (std::int64_t t = 0; t < p.x.extent[1]; ++t) {
    const Window<T> x(p.x, i_b, t, first, width);
    T* y = p.y.at(i_b, t, first);
    for_each_vector(count, [&](auto d, std::size_t c) HWY_ATTR {
      const auto a = weighted_sum(d, weight, x, c, width);
      store(d, hn::Mul(a, sigmoid(d, a)), y + c);
    });
  }
}

// Computes the backward of one strip of all sequences. dweight is summed over the sequences in their order. With a as
// in the forward and da = dy·silu′(a): dweight[j] += Σ_t da[t]·x[t−(W−1)+j], and dx[t−(W−1)] = Σ_j
// weight[W−1−j]·da[t−(W−1)+j], which is known after da[t].
template <int W, class T>
void backward_strip(const ShortConvBackward<T>& p, std::int64_t first, std::int64_t count) {
  const std::int64_t width = W > 0 ? W : p.weight.extent[1], tokens = p.x.extent[1];
  const Taps weight = taps_of(p.weight, first, count);
  Taps dweight, da;  // da of token t is row t mod W
  for (std::int64_t i_b = 0; i_b < p.x.extent[0]; ++i_b) {
    for (std::int64_t t = 0; t < tokens + width - 1; ++t) {
      float* da_t = da.row[t % width];
      if (t < tokens) {
        const Window<T> x(p.x, i_b, t, first, width);
        const T* dy = p.dy.at(i_b, t, first);
        for_each_vector(count, [&](auto d, std::size_t c) HWY_ATTR {
          const auto one = hn::Set(d, 1.0F);
          const auto a = weighted_sum(d, weight, x, c, width);
          const auto sigma = sigmoid(d, a);
          // silu′(a) = σ (1 + a (1 − σ))
          const auto slope = hn::Mul(sigma, hn::MulAdd(a, hn::Sub(one, sigma), one));
          const auto next = hn::Mul(load(d, dy + c), slope);
          hn::StoreU(next, d, da_t + c);
          for (std::int64_t j = 0; j < width; ++j) {
            float* sum = dweight.row[j] + c;
            hn::StoreU(hn::MulAdd(next, load(d, x.row[j] + c), hn::LoadU(d, sum)), d, sum);
          }
        });
      } else {
        std::fill_n(da_t, count, 0.0F);
      }
      if (t < width - 1) continue;
      T* dx = p.dx.at(i_b, t - (width - 1), first);
      const float* row[kMaxConvWidth];
      for (std::int64_t j = 0; j < width; ++j) row[j] = da.row[(t + 1 + j) % width];
      for_each_vector(count, [&](auto d, std::size_t c) HWY_ATTR {
        auto sum = hn::Mul(hn::LoadU(d, weight.row[width - 1] + c), hn::LoadU(d, row[0] + c));
        for (std::int64_t j = 1; j < width; ++j) {
          sum = hn::MulAdd(hn::LoadU(d, weight.row[width - 1 - j] + c), hn::LoadU(d, row[j] + c), sum);
        }
        store(d, sum, dx + c);
      });
    }
  }
  for (std::int64_t c = 0; c < count; ++c) {
    for (std::int64_t j = 0; j < width; ++j) p.dweight(first + c, j) = dweight.row[j][c];
  }
}

template <class T>
void conv_forward(const ShortConvForward<T>& p, std::int64_t i_b, std::int64_t first, std::int64_t count) {
  p.weight.extent[1] == 4 ? forward_strip<4>(p, i_b, first, count) : forward_strip<0>(p, i_b, first, count);
}

template <class T>
void conv_backward(const ShortConvBackward<T>& p, std::int64_t first, std::int64_t count) {
  p.weight.extent[1] == 4 ? backward_strip<4>(p, first, count) : backward_strip<0>(p, first, count);
}

void conv_forward_f32(const ShortConvForward<float>& p, std::int64_t i_b, std::int64_t first, std::int64_t count) {
  conv_forward(p, i_b, first, count);
}
void conv_forward_bf16(const ShortConvForward<bfloat16>& p, std::int64_t i_b, std::int64_t first, std::int64_t count) {
  conv_forward(p, i_b, first, count);
}
void conv_backward_f32(const ShortConvBackward<float>& p, std::int64_t first, std::int64_t count) {
  conv_backward(p, first, count);
}
void conv_backward_bf16(const ShortConvBackward<bfloat16>& p, std::int64_t first, std::int64_t count) {
  conv_backward(p, first, count);
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {

HWY_EXPORT(conv_forward_f32);
HWY_EXPORT(conv_forward_bf16);
HWY_EXPORT(conv_backward_f32);
HWY_EXPORT(conv_backward_bf16);

template <class T>
void short_conv(const ShortConvForward<T>& p, ThreadPool& pool) {
  const std::int64_t channels = p.x.extent[2], per_sequence = strips(channels);
  pool.run(p.x.extent[0] * per_sequence, [&](std::int64_t task, int) {
    const std::int64_t first = task % per_sequence * kStrip, count = std::min(kStrip, channels - first);
    if constexpr (sizeof(T) == sizeof(float)) {
      HWY_DYNAMIC_DISPATCH(conv_forward_f32)(p, task / per_sequence, first, count);
    } else {
      HWY_DYNAMIC_DISPATCH(conv_forward_bf16)(p, task / per_sequence, first, count);
    }
  });
}

template <class T>
void short_conv(const ShortConvBackward<T>& p, ThreadPool& pool) {
  const std::int64_t channels = p.x.extent[2];
  pool.run(strips(channels), [&](std::int64_t task, int) {
    const std::int64_t first = task * kStrip, count = std::min(kStrip, channels - first);
    if constexpr (sizeof(T) == sizeof(float)) {
      HWY_DYNAMIC_DISPATCH(conv_backward_f32)(p, first, count);
    } else {
      HWY_DYNAMIC_DISPATCH(conv_backward_bf16)(p, first, count);
    }
  });
}

template void short_conv(const ShortConvForward<float>&, ThreadPool&);
template void short_conv(const ShortConvForward<bfloat16>&, ThreadPool&);
template void short_conv(const ShortConvBackward<float>&, ThreadPool&);
template void short_conv(const ShortConvBackward<bfloat16>&, ThreadPool&);

}  // namespace efla::cpu
#endif
