// RMS normalisation of a sum on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include "efla/cuda/layers/add_rms_norm.h"
#include "efla/ref/add_rms_norm.h"
#include "tests/cuda/device.h"
#include "tests/cuda/layers/layers.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

template <class T>
struct AddNormData {
  Tensor<float, 2> x, sum, dsum, dx;
  Tensor<T, 2> branch, y, dy, dbranch;
  Tensor<float, 1> weight, dweight;

  AddNormData(std::int64_t rows, std::int64_t columns, bool has_branch, Layout layout)
      : x({rows, columns}, layout),
        dx({rows, columns}, layout),
        y({rows, columns}, layout),
        dy({rows, columns}, layout),
        weight({columns}),
        dweight({columns}) {
    Random random(static_cast<std::uint64_t>(rows + columns));
    randomise(x, random);
    randomise(dy, random);
    randomise(weight, random);
    if (!has_branch) return;
    sum = dsum = Tensor<float, 2>({rows, columns}, layout);
    branch = dbranch = Tensor<T, 2>({rows, columns}, layout);
    randomise(branch, random);
    randomise(dsum, random);
  }
  AddRmsNormForward<T> forward() { return {x.view(), branch.view(), weight.view(), 1e-2F, sum.view(), y.view()}; }
  AddRmsNormBackward<T> backward() {
    return {x.view(), weight.view(), 1e-2F, dy.view(), dsum.view(), dx.view(), dbranch.view(), dweight.view()};
  }
};

template <class T>
void run_on_gpu(AddNormData<T>& data) {
  const DeviceTensor<float, 2> x(data.x), sum(data.sum), dsum(data.dsum), dx(data.dx);
  const DeviceTensor<T, 2> branch(data.branch), y(data.y), dy(data.dy), dbranch(data.dbranch);
  const DeviceTensor<float, 1> weight(data.weight), dweight(data.dweight);
  gpu::add_rms_norm(
      AddRmsNormForward<T>{x.view(), branch.view(), weight.view(), data.forward().eps, sum.view(), y.view()}, nullptr);
  const AddRmsNormBackward<T> backward{x.view(),    weight.view(), data.backward().eps, dy.view(),
                                       dsum.view(), dx.view(),     dbranch.view(),      dweight.view()};
  const PoisonedWorkspace workspace(gpu::add_rms_norm_workspace_bytes(backward));
  gpu::add_rms_norm(backward, workspace.get(), nullptr);
  for (const auto* tensor : {&sum, &dx}) tensor->download();
  for (const auto* tensor : {&y, &dbranch}) tensor->download();
  dweight.download();
  EXPECT_TRUE(workspace.guards_intact());
}

template <class T>
void check_add_norm(std::int64_t rows, std::int64_t columns, bool has_branch, Layout layout) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " D " << columns << " branch " << has_branch
                                  << ' ' << name_of(layout));
  const AddNormData<T> data(rows, columns, has_branch, layout);
  AddNormData<T> expected(data), got(data), again(data);
  ref::add_rms_norm(expected.forward());
  ref::add_rms_norm(expected.backward());
  run_on_gpu(got);
  run_on_gpu(again);
  EXPECT_TRUE(got.sum.sentinels_intact() && got.y.sentinels_intact() && got.dx.sentinels_intact() &&
              got.dbranch.sentinels_intact() && got.dweight.sentinels_intact());
  EXPECT_TRUE(got.sum.same_bits(again.sum) && got.y.same_bits(again.y) && got.dx.same_bits(again.dx) &&
              got.dbranch.same_bits(again.dbranch) && got.dweight.same_bits(again.dweight));
  EXPECT_LE(distance(got.sum.values(), expected.sum.values()).rms, tolerance<float>());
  EXPECT_LE(distance(got.y.values(), expected.y.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dx.values(), expected.dx.values()).rms, tolerance<float>());
  EXPECT_LE(distance(got.dbranch.values(), expected.dbranch.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dweight.values(), expected.dweight.values()).rms, kSumTolerance);
}

TEST(CudaAddRmsNorm, AgreesWithFloat64) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t columns : {3, 64, 200, 256, 1000, 1024, 2048, 4096, 8192}) {
      for (const std::int64_t rows : {1, 33, 3000}) {
        if (rows * columns > (1 << 20)) continue;
        for (const bool has_branch : {true, false}) {
          check_add_norm<float>(rows, columns, has_branch, layout);
          check_add_norm<bfloat16>(rows, columns, has_branch, layout);
        }
      }
    }
  }
}

}  // namespace
}  // namespace efla::test
