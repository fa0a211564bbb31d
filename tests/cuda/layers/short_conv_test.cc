// The short convolution on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "efla/cuda/layers/short_conv.h"
#include "efla/ref/short_conv.h"
#include "tests/cuda/device.h"
#include "tests/cuda/layers/layers.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

struct ConvCase {
  std::int64_t batch = 1, tokens = 1, channels = 1, width = 4;
  Layout layout = Layout::contiguous;
  std::vector<std::int64_t> cu_seqlens = {};
};

template <class T>
struct ConvData {
  Tensor<T, 3> x, dy, y, dx;
  Tensor<float, 2> weight, dweight;
  std::vector<std::int64_t> cu_seqlens;

  explicit ConvData(const ConvCase& c)
      : x({c.batch, c.tokens, c.channels}, c.layout),
        dy({c.batch, c.tokens, c.channels}, c.layout),
        y({c.batch, c.tokens, c.channels}, c.layout),
        dx({c.batch, c.tokens, c.channels}, c.layout),
        weight({c.channels, c.width}),
        dweight({c.channels, c.width}),
        cu_seqlens(c.cu_seqlens) {
    Random random(static_cast<std::uint64_t>(c.tokens + c.channels));
    randomise(x, random);
    randomise(dy, random);
    randomise(weight, random);
  }
  View<const std::int64_t, 1> ends(const std::int64_t* data) const {
    if (cu_seqlens.empty()) return {};
    return View<const std::int64_t, 1>::contiguous(data, {static_cast<std::int64_t>(cu_seqlens.size())});
  }
  ShortConvForward<T> forward() { return {x.view(), weight.view(), y.view(), ends(cu_seqlens.data())}; }
  ShortConvBackward<T> backward() {
    return {x.view(), weight.view(), dy.view(), dx.view(), dweight.view(), ends(cu_seqlens.data())};
  }
};

template <class T>
void run_on_gpu(ConvData<T>& data) {
  const DeviceTensor<T, 3> x(data.x), dy(data.dy), y(data.y), dx(data.dx);
  const DeviceTensor<float, 2> weight(data.weight), dweight(data.dweight);
  const DeviceBytes memory(data.cu_seqlens.size() * sizeof(std::int64_t));
  if (memory.bytes() > 0) {
    gpu::check(cudaMemcpy(memory.data(), data.cu_seqlens.data(), memory.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  const auto ends = data.ends(static_cast<const std::int64_t*>(memory.data()));
  gpu::short_conv(ShortConvForward<T>{x.view(), weight.view(), y.view(), ends}, nullptr);
  const ShortConvBackward<T> backward{x.view(), weight.view(), dy.view(), dx.view(), dweight.view(), ends};
  const PoisonedWorkspace workspace(gpu::short_conv_workspace_bytes(backward));
  gpu::short_conv(backward, workspace.get(), nullptr);
  y.download();
  dx.download();
  dweight.download();
  EXPECT_TRUE(workspace.guards_intact());
}

template <class T>
void check_conv(const ConvCase& c) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " B " << c.batch << " T " << c.tokens << " D " << c.channels
                                  << " W " << c.width << ' ' << name_of(c.layout) << " packed " << c.cu_seqlens.size());
  ConvData<T> expected(c), got(c), again(c);
  ref::short_conv(expected.forward());
  ref::short_conv(expected.backward());
  run_on_gpu(got);
  run_on_gpu(again);
  EXPECT_TRUE(got.y.sentinels_intact() && got.dx.sentinels_intact() && got.dweight.sentinels_intact());
  EXPECT_TRUE(got.y.same_bits(again.y) && got.dx.same_bits(again.dx) && got.dweight.same_bits(again.dweight));
  EXPECT_LE(distance(got.y.values(), expected.y.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dx.values(), expected.dx.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dweight.values(), expected.dweight.values()).rms, kSumTolerance);
}

std::vector<ConvCase> conv_cases() {
  std::vector<ConvCase> cases;
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t width : {1, 2, 3, 4, 5, 8}) {
      for (const std::int64_t channels : {3, 8, 45, 320}) {
        for (const std::int64_t tokens : {1, 2, 15, 17, 128, 300})
          cases.push_back({2, tokens, channels, width, layout});
      }
      for (const std::int64_t channels : {45, 320}) {
        cases.push_back({1, 150, channels, width, layout, {0, 3, 3, 16, 17, 18, 19, 20, 45, 128, 150, 150}});
        cases.push_back({1, 40, channels, width, layout, {0, 0, 40}});
      }
    }
  }
  return cases;
}

TEST(CudaShortConv, AgreesWithFloat64) {
  for (const ConvCase& c : conv_cases()) {
    check_conv<float>(c);
    check_conv<bfloat16>(c);
  }
}

TEST(CudaShortConv, NanStaysWithinItsTaps) {
  const ConvCase c{1, 64, 64, 3, Layout::contiguous, {0, 20, 64}};
  constexpr std::int64_t kTokens[] = {18, 19, 40};
  ConvData<bfloat16> data(c);
  for (const std::int64_t t : kTokens) data.x.view()(0, t, 5) = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  run_on_gpu(data);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t d = 0; d < c.channels; ++d) {
      const bool reached = d == 5 && (t == 18 || t == 19 || (t >= 40 && t < 43));
      const bool reached_back = d == 5 && ((t >= 16 && t < 20) || (t >= 38 && t < 43));
      EXPECT_EQ(std::isnan(to_float(data.y.view()(0, t, d))), reached) << t << ' ' << d;
      EXPECT_EQ(std::isnan(to_float(data.dx.view()(0, t, d))), reached_back) << t << ' ' << d;
    }
  }
}

}  // namespace
}  // namespace efla::test
