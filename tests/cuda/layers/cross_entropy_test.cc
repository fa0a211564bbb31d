// The cross entropy on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include <vector>

#include "efla/cuda/layers/cross_entropy.h"
#include "efla/ref/cross_entropy.h"
#include "tests/cuda/device.h"
#include "tests/cuda/layers/layers.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

template <class T>
void check_cross_entropy(std::int64_t rows, std::int64_t columns, bool gradient, Layout layout) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " V " << columns << " gradient " << gradient
                                  << ' ' << name_of(layout));
  Tensor<T, 2> logits({rows, columns}, layout);
  Random random(static_cast<std::uint64_t>(rows + columns));
  logits.assign(drawn(logits.view().size(), [&] { return 300 + 10 * random.normal(); }));
  std::vector<std::int64_t> targets;
  for (std::int64_t n = 0; n < rows; ++n) targets.push_back(n % 3 == 1 ? kIgnoreIndex : n * n % columns);
  const DeviceBytes targets_there(targets.size() * sizeof(std::int64_t));
  gpu::check(cudaMemcpy(targets_there.data(), targets.data(), targets_there.bytes(), cudaMemcpyHostToDevice),
             "cudaMemcpy");
  const auto targets_at = [&](const void* data) {
    return View<const std::int64_t, 1>::contiguous(static_cast<const std::int64_t*>(data), {rows});
  };
  Tensor<float, 1> share, loss({rows});
  if (gradient) (share = Tensor<float, 1>({1})).view()(0) = 0.25F;
  Tensor<T, 2> expected(logits);
  Tensor<float, 1> expected_loss(loss);
  ref::cross_entropy(CrossEntropy<T>{expected.view(), targets_at(targets.data()), share.view(), expected_loss.view()});
  const DeviceTensor<T, 2> a(logits);
  const DeviceTensor<float, 1> b(share), c(loss);
  gpu::cross_entropy(CrossEntropy<T>{a.view(), targets_at(targets_there.data()), b.view(), c.view()}, nullptr);
  a.download();
  c.download();
  EXPECT_TRUE(logits.sentinels_intact() && loss.sentinels_intact());
  EXPECT_LE(distance(logits.values(), expected.values()).rms, tolerance<T>());
  for (std::int64_t n = 0; n < rows; ++n) EXPECT_NEAR(loss.view()(n), expected_loss.view()(n), 1e-4) << n;
}

TEST(CudaCrossEntropy, AgreesWithFloat64) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t columns : {1, 7, 256, 1000, 32000}) {
      for (const bool gradient : {true, false}) {
        check_cross_entropy<float>(33, columns, gradient, layout);
        check_cross_entropy<bfloat16>(33, columns, gradient, layout);
      }
    }
  }
}

}  // namespace
}  // namespace efla::test
