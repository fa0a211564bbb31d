// RMS normalisation on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include "efla/base/error.h"
#include "efla/cuda/layers/rms_norm.h"
#include "efla/ref/rms_norm.h"
#include "tests/cuda/device.h"
#include "tests/cuda/layers/layers.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

// The tensors of a normalisation: inputs with random numbers, outputs with NaN.
template <class T>
struct NormData {
  Tensor<T, 2> x, dy, y, dx, gate, dgate;
  Tensor<float, 1> weight, dweight;
  GateActivation activation = GateActivation::silu;

  NormData(std::int64_t rows, std::int64_t columns, bool weighted, Layout layout)
      : x({rows, columns}, layout),
        dy({rows, columns}, layout),
        y({rows, columns}, layout),
        dx({rows, columns}, layout) {
    Random random(static_cast<std::uint64_t>(rows + columns));
    randomise(x, random);
    randomise(dy, random);
    if (!weighted) return;
    weight = dweight = Tensor<float, 1>({columns});
    randomise(weight, random);
  }
  void add_gate(GateActivation with, Layout layout) {
    Random random(5);
    gate = dgate = Tensor<T, 2>(x.view().extent, layout);
    randomise(gate, random);
    activation = with;
  }
  RmsNormForward<T> forward() { return {x.view(), weight.view(), kEps, y.view(), gate.view(), activation}; }
  RmsNormBackward<T> backward() {
    return {x.view(), weight.view(), kEps, dy.view(), dx.view(), dweight.view(), gate.view(), activation, dgate.view()};
  }
  static constexpr float kEps = 1e-2F;
};

template <class T>
void run_on_gpu(NormData<T>& data) {
  const DeviceTensor<T, 2> x(data.x), dy(data.dy), y(data.y), dx(data.dx), gate(data.gate), dgate(data.dgate);
  const DeviceTensor<float, 1> weight(data.weight), dweight(data.dweight);
  gpu::rms_norm(RmsNormForward<T>{x.view(), weight.view(), data.kEps, y.view(), gate.view(), data.activation}, nullptr);
  const RmsNormBackward<T> backward{x.view(),       weight.view(), data.kEps,       dy.view(),   dx.view(),
                                    dweight.view(), gate.view(),   data.activation, dgate.view()};
  const PoisonedWorkspace workspace(gpu::rms_norm_workspace_bytes(backward));
  gpu::rms_norm(backward, workspace.get(), nullptr);
  for (const auto* tensor : {&y, &dx, &dgate}) tensor->download();
  dweight.download();
  EXPECT_TRUE(workspace.guards_intact());
}

template <class T>
void check_norm(const NormData<T>& data) {
  NormData<T> expected(data), got(data), again(data);
  ref::rms_norm(expected.forward());
  ref::rms_norm(expected.backward());
  run_on_gpu(got);
  run_on_gpu(again);
  EXPECT_TRUE(got.y.sentinels_intact() && got.dx.sentinels_intact() && got.dweight.sentinels_intact() &&
              got.dgate.sentinels_intact());
  EXPECT_TRUE(got.y.same_bits(again.y) && got.dx.same_bits(again.dx) && got.dweight.same_bits(again.dweight) &&
              got.dgate.same_bits(again.dgate));
  EXPECT_LE(distance(got.y.values(), expected.y.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dx.values(), expected.dx.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dgate.values(), expected.dgate.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dweight.values(), expected.dweight.values()).rms, kSumTolerance);
}

template <class T>
void check_norms(std::int64_t rows, std::int64_t columns, bool weighted, Layout layout) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " D " << columns << " weighted " << weighted
                                  << ' ' << name_of(layout));
  NormData<T> data(rows, columns, weighted, layout);
  check_norm(data);
  for (const GateActivation activation : kActivations) {
    SCOPED_TRACE(activation_name(activation));
    data.add_gate(activation, layout);
    check_norm(data);
  }
}

void check_rows(std::int64_t rows) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t columns : {3, 7, 64, 128, 200, 256, 1000, 1024, 2048, 4096, 8192}) {
      if (rows * columns > (1 << 19)) continue;
      for (const bool weighted : {true, false}) {
        check_norms<float>(rows, columns, weighted, layout);
        check_norms<bfloat16>(rows, columns, weighted, layout);
      }
    }
  }
}

TEST(CudaRmsNorm, FewRowsAgreeWithFloat64) {
  check_rows(1);
  check_rows(33);
}

TEST(CudaRmsNorm, ManyRowsAgreeWithFloat64) { check_rows(2000); }

TEST(CudaRmsNorm, RefusesLongRows) {
  NormData<float> data(1, gpu::kMaxNormColumns + 1, false, Layout::contiguous);
  EXPECT_THROW(gpu::rms_norm(data.forward(), nullptr), Error);
}

}  // namespace
}  // namespace efla::test
