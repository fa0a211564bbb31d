// Every implementation of the short convolution against float64, on every SIMD target of this machine.
#include "efla/ops/layers/short_conv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/random.h"
#include "efla/cpu/common/target.h"
#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"
#include "tests/support/relative_error.h"
#include "tests/support/tensor.h"

namespace efla {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// [B, T, D] with rows further apart than D, filled with random numbers or with NaN.
template <class T>
struct Activations {
  std::vector<T> data;
  std::int64_t batch, tokens, channels, stride;

  Activations(std::int64_t b, std::int64_t t, std::int64_t d, std::int64_t padding)
      : data(b * t * (d + padding), test::rounded<T>(kPoison)), batch(b), tokens(t), channels(d), stride(d + padding) {}
  Activations& randomise(Random& random, double scale) {
    for (std::int64_t row = 0; row < batch * tokens; ++row) {
      for (std::int64_t c = 0; c < channels; ++c) data[row * stride + c] = test::rounded<T>(scale * random.normal());
    }
    return *this;
  }
  View<T, 3> view() { return {data.data(), {batch, tokens, channels}, {tokens * stride, stride, 1}}; }
  double operator()(std::int64_t b, std::int64_t t, std::int64_t c) const {
    return t < 0 ? 0.0 : to_float(data[(b * tokens + t) * stride + c]);
  }
};

struct Sum {
  double value = 0, terms = 0;
  void add(double term) {
    value += term;
    terms += std::abs(term);
  }
};

template <class T>
struct Case {
  Random random{7};
  std::int64_t width;
  Activations<T> x, y, dy, dx;
  std::vector<float> weight, dweight;

  Case(std::int64_t b, std::int64_t t, std::int64_t d, std::int64_t w)
      : width(w), x(b, t, d, 5), y(b, t, d, 3), dy(b, t, d, 0), dx(b, t, d, 8), weight(d * w), dweight(d * w, kPoison) {
    x.randomise(random, 1.5);
    dy.randomise(random, 1.0);
    for (auto& tap : weight) tap = static_cast<float>(random.normal());
  }
  void run(int threads, const std::string& implementation = "auto", const std::vector<std::int64_t>& cu_seqlens = {}) {
    ThreadPool pool(threads);
    const RunOptions options{implementation, {.pool = &pool}};
    View<const std::int64_t, 1> ends;
    if (!cu_seqlens.empty()) ends = {cu_seqlens.data(), {static_cast<std::int64_t>(cu_seqlens.size())}, {1}};
    const auto taps = View<const float, 2>::contiguous(weight.data(), {x.channels, width});
    short_conv_forward(ShortConvForward<T>{x.view(), taps, y.view(), ends}, options);
    short_conv_backward(ShortConvBackward<T>{x.view(), taps, dy.view(), dx.view(),
                                             View<float, 2>::contiguous(dweight.data(), {x.channels, width}), ends},
                        options);
  }
};

template <class T>
void check(const std::string& implementation, std::int64_t b, std::int64_t t, std::int64_t d, std::int64_t w,
           double tolerance) {
  SCOPED_TRACE(testing::Message() << implementation << " B " << b << " T " << t << " D " << d << " W " << w << ' '
                                  << cpu::target_name());
  Case<T> p(b, t, d, w);
  p.run(2, implementation);
  std::vector<Sum> dx(b * t * d), dweight(d * w);
  test::RelativeError y_error, dx_error, dweight_error;
  for (std::int64_t i_b = 0; i_b < b; ++i_b) {
    for (std::int64_t i_t = 0; i_t < t; ++i_t) {
      for (std::int64_t c = 0; c < d; ++c) {
        Sum a;
        for (std::int64_t j = 0; j < w; ++j) a.add(p.weight[c * w + j] * p.x(i_b, i_t - (w - 1) + j, c));
        const double sigma = 1 / (1 + std::exp(-a.value));
        y_error.add(p.y(i_b, i_t, c), a.value * sigma, a.terms * sigma);
        const double da = p.dy(i_b, i_t, c) * sigma * (1 + a.value * (1 - sigma));
        for (std::int64_t j = 0; j < w; ++j) {
          const std::int64_t from = i_t - (w - 1) + j;
          if (from >= 0) dx[(i_b * t + from) * d + c].add(p.weight[c * w + j] * da);
          dweight[c * w + j].add(p.x(i_b, from, c) * da);
        }
      }
    }
  }
  for (std::int64_t row = 0; row < b * t; ++row) {
    for (std::int64_t c = 0; c < d; ++c) {
      dx_error.add(p.dx(row / t, row % t, c), dx[row * d + c].value, dx[row * d + c].terms);
    }
  }
  for (std::size_t i = 0; i < dweight.size(); ++i) dweight_error.add(p.dweight[i], dweight[i].value, dweight[i].terms);
  EXPECT_LE(y_error.value(), tolerance);
  EXPECT_LE(dx_error.value(), tolerance);
  EXPECT_LE(dweight_error.value(), 4e-7);
}

TEST(ShortConv, AgreesWithFloat64OnEveryTarget) {
  const auto check_sizes = [](const std::string& implementation) {
    for (const std::int64_t w : {1, 2, 3, 4, 5, 8}) {
      for (const std::int64_t d : {1, 7, 32, 45, 192}) {
        for (const std::int64_t t : {1, 2, 7, 130}) {
          check<float>(implementation, 2, t, d, w, 4e-7);
          check<bfloat16>(implementation, 2, t, d, w, 3e-3);
        }
      }
    }
  };
  for (const std::string& target : cpu::supported_targets()) {
    const test::OnTarget guard(target);
    for (const std::string& implementation : test::fast_rows(short_conv_implementations())) check_sizes(implementation);
  }
  check_sizes("ref");
}

TEST(ShortConv, PackedSequencesAreThoseOneByOne) {
  const std::vector<std::int64_t> ends{0, 3, 3, 40, 45};
  for (const std::string implementation : {"simd", "ref"}) {
    SCOPED_TRACE(implementation);
    Case<float> packed(1, 45, 37, 4);
    packed.run(2, implementation, ends);
    std::vector<float> dweight(packed.dweight.size());
    for (std::size_t n = 0; n + 1 < ends.size(); ++n) {
      const std::int64_t tokens = ends[n + 1] - ends[n];
      if (tokens == 0) continue;
      Case<float> alone(1, tokens, 37, 4);
      for (const auto& [from, to] : {std::pair(&packed.x, &alone.x), std::pair(&packed.dy, &alone.dy)}) {
        std::copy_n(from->data.begin() + ends[n] * from->stride, to->data.size(), to->data.begin());
      }
      alone.weight = packed.weight;
      alone.run(2, implementation);
      for (std::size_t i = 0; i < dweight.size(); ++i) dweight[i] += alone.dweight[i];
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t c = 0; c < 37; ++c) {
          ASSERT_EQ(packed.y(0, ends[n] + t, c), alone.y(0, t, c)) << n << ' ' << t << ' ' << c;
          ASSERT_EQ(packed.dx(0, ends[n] + t, c), alone.dx(0, t, c)) << n << ' ' << t << ' ' << c;
        }
      }
    }
    for (std::size_t i = 0; i < dweight.size(); ++i) EXPECT_NEAR(packed.dweight[i], dweight[i], 1e-5) << i;
  }
}

TEST(ShortConv, RefusesWhatDoesNotFit) {
  using test::expect_error;
  Case<float> p(1, 6, 9, 3);
  const auto taps = View<const float, 2>::contiguous(p.weight.data(), {9, 3});
  ShortConvForward<float> good{p.x.view(), taps, p.y.view()}, bad = good;
  bad.weight.extent[0] = 8;
  expect_error([&] { short_conv_forward(bad); }, "weight", "got shape [8, 3], expected shape [9, 3]");
  bad = good;
  bad.weight.extent[1] = 9;
  expect_error([&] { short_conv_forward(bad); }, "filter width W", "got 9, expected 1 to 8");
  bad = good;
  bad.y.extent[1] = 5;
  expect_error([&] { short_conv_forward(bad); }, "y", "expected shape [1, 6, 9]");
  bad = good;
  const std::int64_t ends[] = {0, 4, 5};
  bad.cu_seqlens = {ends, {3}, {1}};
  expect_error([&] { short_conv_forward(bad); }, "cu_seqlens[2]", "got 5, expected T = 6");
  bad = good;
  bad.x.stride[2] = 2;
  expect_error([&] { short_conv_forward(bad, {.implementation = "simd"}); }, "implementation", "side by side");
  expect_error([&] { short_conv_forward(good, {.implementation = "fast"}); }, "implementation",
               "one of auto, simd, cuda, ref");
  EXPECT_EQ(short_conv_forward(good).implementation, "simd");
}

TEST(ShortConv, GivesTheSameBitsForAnyNumberOfThreads) {
  Case<float> one(3, 70, 100, 4), many(3, 70, 100, 4);
  one.run(1);
  many.run(3);
  const auto same = [](const auto& a, const auto& b) {
    return !std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0]));
  };
  EXPECT_TRUE(same(one.y.data, many.y.data));
  EXPECT_TRUE(same(one.dx.data, many.dx.data));
  EXPECT_TRUE(same(one.dweight, many.dweight));
}

TEST(ShortConv, SaturatesWithoutOverflow) {
  Case<float> p(1, 6, 9, 1);
  const float values[] = {-3e38F, -1e4F, -90.0F, 90.0F, 1e4F, 3e38F};
  for (std::int64_t t = 0; t < 6; ++t) {
    for (std::int64_t c = 0; c < 9; ++c) p.x.data[t * p.x.stride + c] = values[t];
  }
  std::fill(p.weight.begin(), p.weight.end(), 1.0F);
  p.run(1);
  for (std::int64_t t = 0; t < 6; ++t) {
    const bool positive = values[t] > 0;
    for (std::int64_t c = 0; c < 9; ++c) {
      EXPECT_NEAR(p.y(0, t, c), positive ? values[t] : 0.0, 1e-30) << t;
      EXPECT_NEAR(p.dx(0, t, c), positive ? p.dy(0, t, c) : 0.0, 1e-30) << t;
    }
  }
}

}  // namespace
}  // namespace efla
