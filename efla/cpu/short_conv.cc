#include "efla/cpu/short_conv.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/cpu/short_conv.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "efla/cpu/element-inl.h"
#include "hwy/highway.h"

#ifndef EFLA_CPU_SHORT_CONV_ONCE_
#define EFLA_CPU_SHORT_CONV_ONCE_
namespace efla::cpu {

// Channels of one task, and tokens after which it goes from one vector of channels to the next: of x, dy and dx so many
// rows of so many channels stay in L1.
inline constexpr std::int64_t kStrip = 32, kBlock = 32;

inline std::int64_t strips(std::int64_t channels) { return (channels + kStrip - 1) / kStrip; }

// One row of a strip's channels for each tap.
struct Taps {
  alignas(64) float row[kMaxConvWidth][kStrip] = {};
};

}  // namespace efla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

// e^x for x ≤ 0 to 2 ulp, 0 below e^−87: x = n ln 2 + r, e^r by its Taylor series, whose next term is below 2⁻²⁷.
// Half the instructions of hwy/contrib/math, which serves all of float32.
template <class D>
HWY_INLINE hn::Vec<D> exp_of_negative(D d, hn::Vec<D> x) {
  const hn::Rebind<std::int32_t, D> di;
  const auto n = hn::NearestInt(hn::Mul(x, hn::Set(d, 1.44269504F)));
  const auto nf = hn::ConvertTo(d, n);
  // ln 2 in two parts; products with the first are exact.
  const auto r = hn::NegMulAdd(nf, hn::Set(d, -2.12194440e-4F), hn::NegMulAdd(nf, hn::Set(d, 0.693359375F), x));
  const auto r2 = hn::Mul(r, r);
  const auto p01 = hn::Add(r, hn::Set(d, 1.0F));
  const auto p23 = hn::MulAdd(r, hn::Set(d, 1.0F / 6), hn::Set(d, 1.0F / 2));
  const auto p45 = hn::MulAdd(r, hn::Set(d, 1.0F / 120), hn::Set(d, 1.0F / 24));
  const auto p67 = hn::MulAdd(r, hn::Set(d, 1.0F / 5040), hn::Set(d, 1.0F / 720));
  const auto p = hn::MulAdd(hn::Mul(r2, r2), hn::MulAdd(r2, p67, p45), hn::MulAdd(r2, p23, p01));
  const auto scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(n)));
  return hn::IfThenElseZero(hn::Ge(x, hn::Set(d, -87.0F)), scaled);
}

// By e^−|a|, which never overflows.
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> a) {
  const auto one = hn::Set(d, 1.0F);
  const auto exp = exp_of_negative(d, hn::Or(a, hn::Set(d, -0.0F)));
  return hn::Div(hn::IfThenElse(hn::Lt(a, hn::Zero(d)), exp, one), hn::Add(one, exp));
}

// The weights of `count` channels from `first` on as W taps; a narrower convolution gets zeros in front.
template <int W>
Taps taps_of(const View<const float, 2>& weight, std::int64_t first, std::int64_t count) {
  Taps taps;
  const std::int64_t width = weight.extent[1];
  for (std::int64_t j = 0; j < width; ++j) {
    for (std::int64_t c = 0; c < count; ++c) taps.row[W - width + j][c] = weight(first + c, j);
  }
  return taps;
}

// The last W inputs of one vector of channels, oldest first.
template <int W, class D>
struct Window {
  hn::Vec<D> x[W];

  // As before token t: x[1 …] are the inputs t−(W−1) … t−1, those before the first token zero.
  template <class T>
  HWY_INLINE Window(D d, const T* at_t, std::int64_t stride, std::int64_t t) {
    for (int j = 1; j < W; ++j) x[j] = t >= W - j ? load(d, at_t - (W - j) * stride) : hn::Zero(d);
  }
  HWY_INLINE Window(D d, const Taps& rows, std::int64_t c) {
    for (int j = 1; j < W; ++j) x[j] = hn::Load(d, rows.row[j] + c);
  }
  HWY_INLINE void push(hn::Vec<D> next) {
    for (int j = 0; j + 1 < W; ++j) x[j] = x[j + 1];
    x[W - 1] = next;
  }
};

// Tokens [begin, end) of one vector of channels; x and y point to the first of them.
template <int W, class D, class T>
void forward_column(D d, const T* x, std::int64_t x_stride, const float* weight, T* y, std::int64_t y_stride,
                    std::int64_t begin, std::int64_t end) {
  hn::Vec<D> w[W];
  for (int j = 0; j < W; ++j) w[j] = hn::Load(d, weight + j * kStrip);
  Window<W, D> window(d, x, x_stride, begin);
  for (std::int64_t t = begin; t < end; ++t, x += x_stride, y += y_stride) {
    window.push(load(d, x));
    auto a = hn::Mul(w[0], window.x[0]);
    for (int j = 1; j < W; ++j) a = hn::MulAdd(w[j], window.x[j], a);
    store(d, hn::Mul(a, sigmoid(d, a)), y);
  }
}

template <int W, class T>
void forward_strip(const ShortConvForward<T>& p, std::int64_t i_b, std::int64_t first, std::int64_t count) {
  const Taps weight = taps_of<W>(p.weight, first, count);
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t begin = 0; begin < p.x.extent[1]; begin += kBlock) {
    const std::int64_t end = std::min(p.x.extent[1], begin + kBlock);
    const T* x = p.x.at(i_b, begin, first);
    T* y = p.y.at(i_b, begin, first);
    std::int64_t c = 0;
    for (; c + lanes <= count; c += lanes) {
      forward_column<W>(d, x + c, p.x.stride[1], weight.row[0] + c, y + c, p.y.stride[1], begin, end);
    }
    for (; c < count; ++c) {
      forward_column<W>(d1, x + c, p.x.stride[1], weight.row[0] + c, y + c, p.y.stride[1], begin, end);
    }
  }
}

// What the backward of one strip carries from block to block: dL/da of the last W−1 tokens, and dweight so far.
struct Carry {
  Taps da, dweight;
};

// One vector of channels over one block of a sequence. Its pointers are those of token `begin`.
template <class T>
struct Column {
  const T* x;
  const T* dy;
  T* dx;
  std::int64_t x_stride, dy_stride, dx_stride;
  std::int64_t begin, end, tokens;
};

// With a as in the forward and da = dy·silu′(a):  dweight[j] += Σ_t da[t]·x[t−(W−1)+j], and
// dx[t−(W−1)] = Σ_j weight[W−1−j]·da[t−(W−1)+j], which is known when da[t] is.
template <int W, class D, class T>
void backward_column(D d, Column<T> p, const Taps& weight, std::int64_t c, Carry& carry) {
  hn::Vec<D> w[W], dweight[W];
  for (int j = 0; j < W; ++j) {
    w[j] = hn::Load(d, weight.row[j] + c);
    dweight[j] = hn::Zero(d);
  }
  Window<W, D> window(d, p.x, p.x_stride, p.begin), da(d, carry.da, c);
  const auto push_da = [&](hn::Vec<D> next, std::int64_t t, T* dx) HWY_ATTR {
    da.push(next);
    auto sum = hn::Mul(w[W - 1], da.x[0]);
    for (int j = 1; j < W; ++j) sum = hn::MulAdd(w[W - 1 - j], da.x[j], sum);
    if (t >= W - 1) store(d, sum, dx);
  };
  T* dx = p.dx - (W - 1) * p.dx_stride;
  for (std::int64_t t = p.begin; t < p.end; ++t) {
    window.push(load(d, p.x));
    auto a = hn::Mul(w[0], window.x[0]);
    for (int j = 1; j < W; ++j) a = hn::MulAdd(w[j], window.x[j], a);
    const auto sigma = sigmoid(d, a);
    // silu′(a) = σ (1 + a (1 − σ))
    const auto slope = hn::Mul(sigma, hn::MulAdd(a, hn::Sub(hn::Set(d, 1.0F), sigma), hn::Set(d, 1.0F)));
    const auto next = hn::Mul(load(d, p.dy), slope);
    for (int j = 0; j < W; ++j) dweight[j] = hn::MulAdd(next, window.x[j], dweight[j]);
    push_da(next, t, dx);
    p.x += p.x_stride;
    p.dy += p.dy_stride;
    dx += p.dx_stride;
  }
  for (int j = 1; j < W; ++j) hn::Store(da.x[j], d, carry.da.row[j] + c);
  for (int j = 0; j < W; ++j) {
    float* sum = carry.dweight.row[j] + c;
    hn::Store(hn::Add(hn::Load(d, sum), dweight[j]), d, sum);
  }
  if (p.end < p.tokens) return;
  for (std::int64_t t = p.tokens; t < p.tokens + W - 1; ++t, dx += p.dx_stride) push_da(hn::Zero(d), t, dx);
}

// One strip of all sequences: dweight is summed over them in order.
template <int W, class T>
void backward_strip(const ShortConvBackward<T>& p, std::int64_t first, std::int64_t count) {
  const Taps weight = taps_of<W>(p.weight, first, count);
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t tokens = p.x.extent[1], width = p.weight.extent[1];
  Carry carry;
  for (std::int64_t i_b = 0; i_b < p.x.extent[0]; ++i_b) {
    carry.da = {};
    for (std::int64_t begin = 0; begin < tokens; begin += kBlock) {
      const auto column = [&](std::int64_t c) {
        return Column<T>{p.x.at(i_b, begin, first + c),
                         p.dy.at(i_b, begin, first + c),
                         p.dx.at(i_b, begin, first + c),
                         p.x.stride[1],
                         p.dy.stride[1],
                         p.dx.stride[1],
                         begin,
                         std::min(tokens, begin + kBlock),
                         tokens};
      };
      std::int64_t c = 0;
      for (; c + lanes <= count; c += lanes) backward_column<W>(d, column(c), weight, c, carry);
      for (; c < count; ++c) backward_column<W>(d1, column(c), weight, c, carry);
    }
  }
  for (std::int64_t c = 0; c < count; ++c) {
    for (std::int64_t j = 0; j < width; ++j) p.dweight(first + c, j) = carry.dweight.row[W - width + j][c];
  }
}

template <class T>
void conv_forward(const ShortConvForward<T>& p, std::int64_t i_b, std::int64_t first, std::int64_t count) {
  const std::int64_t width = p.weight.extent[1];
  if (width == 1) return forward_strip<1>(p, i_b, first, count);
  if (width <= 4) return forward_strip<4>(p, i_b, first, count);
  forward_strip<8>(p, i_b, first, count);
}

template <class T>
void conv_backward(const ShortConvBackward<T>& p, std::int64_t first, std::int64_t count) {
  const std::int64_t width = p.weight.extent[1];
  if (width == 1) return backward_strip<1>(p, first, count);
  if (width <= 4) return backward_strip<4>(p, first, count);
  backward_strip<8>(p, first, count);
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
