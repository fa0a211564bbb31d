// Gated linear units on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include "efla/cuda/layers/glu.h"
#include "efla/ref/glu.h"
#include "tests/cuda/device.h"
#include "tests/cuda/layers/layers.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

template <class T>
void check_glu(std::int64_t rows, std::int64_t columns, Layout layout, GateActivation activation) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " D " << columns << ' ' << name_of(layout)
                                  << ' ' << activation_name(activation));
  Tensor<T, 2> gate({rows, columns}, layout), up(gate), dy(gate);
  Random random(static_cast<std::uint64_t>(rows + columns));
  for (auto* tensor : {&gate, &up, &dy}) randomise(*tensor, random);
  gate.view()(0, 0) = from_state<T>(-200.0F);
  gate.view()(rows - 1, columns - 1) = from_state<T>(200.0F);
  Tensor<T, 2> y({rows, columns}, layout), dgate(y), dup(y), expected_y(y), expected_dgate(y), expected_dup(y);
  ref::glu(GluForward<T>{gate.view(), up.view(), expected_y.view(), activation});
  ref::glu(
      GluBackward<T>{gate.view(), up.view(), dy.view(), expected_dgate.view(), expected_dup.view(), {}, activation});
  const DeviceTensor<T, 2> a(gate), b(up), c(dy), d(y), e(dgate), f(dup);
  gpu::glu(GluForward<T>{a.view(), b.view(), d.view(), activation}, nullptr);
  gpu::glu(GluBackward<T>{a.view(), b.view(), c.view(), e.view(), f.view(), {}, activation}, nullptr);
  for (const auto* tensor : {&d, &e, &f}) tensor->download();
  Tensor<T, 2> again({rows, columns}, layout);
  const DeviceTensor<T, 2> h(again);
  gpu::glu(GluBackward<T>{a.view(), b.view(), c.view(), e.view(), f.view(), h.view(), activation}, nullptr);
  h.download();
  EXPECT_TRUE(again.same_bits(y));
  EXPECT_TRUE(y.sentinels_intact() && dgate.sentinels_intact() && dup.sentinels_intact() && again.sentinels_intact());
  EXPECT_LE(distance(y.values(), expected_y.values()).rms, tolerance<T>());
  EXPECT_LE(distance(dgate.values(), expected_dgate.values()).rms, tolerance<T>());
  EXPECT_LE(distance(dup.values(), expected_dup.values()).rms, tolerance<T>());
}

TEST(CudaGlu, AgreesWithFloat64) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t columns : {1, 3, 64, 200, 2816}) {
      for (const std::int64_t rows : {1, 33, 300}) {
        for (const auto activation : kActivations) {
          check_glu<float>(rows, columns, layout, activation);
          check_glu<bfloat16>(rows, columns, layout, activation);
        }
      }
    }
  }
}

}  // namespace
}  // namespace efla::test
