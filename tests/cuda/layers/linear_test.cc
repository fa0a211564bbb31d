// The product of few rows with a weight matrix on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "efla/base/random.h"
#include "efla/cuda/layers/linear.h"
#include "efla/ref/linear.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

struct LinearCase {
  std::int64_t rows, columns, outputs;  // outputs: rows of the weight; with swiglu y has half as many columns
  bool narrow = false, norm = false, swiglu = false, residual = false;
};

std::string text_of(const LinearCase& c) {
  return std::to_string(c.rows) + " x " + std::to_string(c.columns) + " x " + std::to_string(c.outputs) +
         (c.narrow ? " bfloat16" : "") + (c.norm ? " norm" : "") + (c.swiglu ? " swiglu" : "") +
         (c.residual ? " residual" : "");
}

// The tensors of a product; y is poisoned.
struct LinearData {
  Tensor<float, 2> x, weight, residual, y;
  Tensor<bfloat16, 2> narrow;
  Tensor<float, 1> norm;
  bool swiglu;

  explicit LinearData(const LinearCase& c) : swiglu(c.swiglu) {
    Random random(static_cast<std::uint64_t>(c.columns + c.outputs));
    const std::int64_t outputs = c.swiglu ? c.outputs / 2 : c.outputs;
    const double factor = 1 / std::sqrt(static_cast<double>(c.columns));
    x = random_tensor<float, 2>({c.rows, c.columns}, random, 3.0);
    if (c.narrow) {
      narrow = random_tensor<bfloat16, 2>({c.outputs, c.columns}, random, factor);
    } else {
      weight = random_tensor<float, 2>({c.outputs, c.columns}, random, factor);
    }
    if (c.norm) norm = random_tensor<float, 1>({c.columns}, random);
    if (c.residual) residual = random_tensor<float, 2, Layout::sliced>({c.rows, outputs}, random);
    y = Tensor<float, 2>({c.rows, outputs}, Layout::sliced);
  }
  LinearForward forward() {
    LinearForward p{x.view(), weight.view(), y.view()};
    p.narrow_weight = narrow.view();
    p.norm_weight = norm.view();
    p.norm_eps = 1e-5F;
    p.swiglu = swiglu;
    p.residual = residual.view();
    return p;
  }
};

// Calls f with the problem on the device and brings y back.
template <class F>
void on_gpu(LinearData& data, F&& f) {
  const DeviceTensor<float, 2> x(data.x), weight(data.weight), residual(data.residual), y(data.y);
  const DeviceTensor<bfloat16, 2> narrow(data.narrow);
  const DeviceTensor<float, 1> norm(data.norm);
  LinearForward p = data.forward();
  p.x = x.view();
  p.weight = weight.view();
  p.narrow_weight = narrow.view();
  p.norm_weight = norm.view();
  p.residual = residual.view();
  p.y = y.view();
  f(p);
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  y.download();
}

void check_linear(const LinearCase& c) {
  SCOPED_TRACE(text_of(c));
  LinearData expected(c), got(c), replayed(c);
  ref::linear(expected.forward());
  on_gpu(got, [](const LinearForward& p) {
    ASSERT_EQ(gpu::linear_refusal(p), "");
    gpu::linear(p, nullptr);
  });
  on_gpu(replayed, [](const LinearForward& p) {
    replay_in_graph([&](cudaStream_t stream) {
      gpu::linear(p, stream);
      gpu::linear(p, stream);
    });
  });
  EXPECT_TRUE(got.y.sentinels_intact());
  EXPECT_TRUE(got.y.same_bits(replayed.y));
  EXPECT_LE(distance(got.y.values(), expected.y.values()).rms, c.narrow ? tolerance_of("float32").cap : 1e-6);
}

class CudaLinear : public testing::Test {
 protected:
  void SetUp() override {
    const auto reason = why_no_gpu();
    if (!reason.empty()) GTEST_SKIP() << reason;
    LinearData data({1, 64, 8});
    std::string refusal;
    on_gpu(data, [&](const LinearForward& p) { refusal = gpu::linear_refusal(p); });
    if (!refusal.empty()) GTEST_SKIP() << refusal;
  }
};

TEST_F(CudaLinear, IsTheFloat64Product) {
  for (const bool narrow : {false, true}) {
    for (const std::int64_t rows : {1, 2, 4, 5, 8}) {
      if (!narrow && rows > 4) continue;
      for (const std::int64_t columns : {8, 40, 128, 1000, 1024, 2816}) {
        for (const std::int64_t outputs : {2, 8, 90, 3080}) check_linear({rows, columns, outputs, narrow});
      }
    }
  }
}

// A warp's slice of x is longer than x where columns are no multiple of it.
TEST_F(CudaLinear, IgnoresWhatSharedMemoryHeld) {
  for (const bool narrow : {false, true}) {
    for (const std::int64_t columns : {40, 264}) {
      LinearData nans({1, 2816, 3080, narrow});
      Random random(1);
      if (narrow) {
        nans.narrow = random_tensor<bfloat16, 2>({3080, 2816}, random, std::nan(""));
      } else {
        nans.weight = random_tensor<float, 2>({3080, 2816}, random, std::nan(""));
      }
      on_gpu(nans, [](const LinearForward& p) { gpu::linear(p, nullptr); });
      check_linear({1, columns, 90, narrow, /*norm=*/true});
    }
  }
}

TEST_F(CudaLinear, HasWhatStandsBeforeAndAfterIt) {
  for (const bool narrow : {false, true}) {
    for (const std::int64_t rows : {1, 3}) {
      for (const std::int64_t outputs : {6, 1024, 5632, 20000}) {
        check_linear({rows, 1024, outputs, narrow, true});
        check_linear({rows, 1024, outputs, narrow, true, true});
        check_linear({rows, 264, outputs, narrow, true, true, true});
        check_linear({rows, 2816, std::min<std::int64_t>(outputs, 1024), narrow, false, false, true});
      }
    }
  }
}

// Rows and columns are parameters, so that a slow tool, such as compute-sanitizer's racecheck, can take some of them.
class CudaLinearManyRows : public CudaLinear,
                           public testing::WithParamInterface<std::tuple<std::int64_t, std::int64_t>> {};

TEST_P(CudaLinearManyRows, TakeBfloat16Weights) {
  const auto [rows, columns] = GetParam();
  for (const std::int64_t outputs : {2, 90, 1024, 3080}) {
    check_linear({rows, columns, outputs, true});
    check_linear({rows, columns, outputs, true, true, true});
    check_linear({rows, columns, outputs, true, true, false, true});
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, CudaLinearManyRows,
                         testing::Combine(testing::Values(9, 17, 64), testing::Values(8, 200, 1024, 1536)),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) + "x" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_F(CudaLinear, TakesTheSizesOfALanguageModel) {
  for (const std::int64_t rows : {9, 17, 64}) {
    check_linear({rows, 2816, 1024, true, false, false, true});
    check_linear({rows, 1024, 5632, true, true, true});
  }
  check_linear({17, 1024, 20000, true, true});
}

// Whose columns exceed the shared memory, so that the product is the sum of several.
TEST_F(CudaLinear, TakesTheSizesOfLargerLanguageModels) {
  for (const std::int64_t rows : {1, 4, 8, 64}) {
    for (const std::int64_t columns : {3584, 9216, 12288})
      check_linear({rows, columns, 1024, true, false, false, true});
    for (const std::int64_t columns : {2560, 4096}) check_linear({rows, columns, 2048, true, true, true});
  }
  check_linear({1, 12288, 256, false, false, false, true});
  check_linear({9, 4096, 90, true, true});
}

TEST_F(CudaLinear, ARowHasTheSameBitsWhateverIsBesideIt) {
  for (const bool narrow : {false, true}) {
    const std::int64_t most = narrow ? 8 : 4;
    LinearData all({most, 1024, 1000, narrow, true});
    on_gpu(all, [](const LinearForward& p) { gpu::linear(p, nullptr); });
    for (std::int64_t rows = 1; rows < most; ++rows) {
      LinearData some({most, 1024, 1000, narrow, true});
      on_gpu(some, [&](LinearForward p) {
        p.x.data = p.x.at(most - rows);
        p.y.data = p.y.at(most - rows);
        p.x.extent[0] = p.y.extent[0] = rows;
        gpu::linear(p, nullptr);
      });
      for (std::int64_t m = most - rows; m < most; ++m) {
        for (std::int64_t n = 0; n < 1000; ++n) ASSERT_EQ(some.y.view()(m, n), all.y.view()(m, n)) << rows << " rows";
      }
    }
  }
}

TEST_F(CudaLinear, SaysWhatItRefuses) {
  const auto refusal_of = [](const LinearCase& c) {
    LinearData data(c);
    std::string refusal;
    on_gpu(data, [&](const LinearForward& p) { refusal = gpu::linear_refusal(p); });
    return refusal;
  };
  EXPECT_NE(refusal_of({5, 64, 8}).find("at most 4 rows"), std::string::npos);
  EXPECT_NE(refusal_of({65, 64, 8, true}).find("at most 64 rows"), std::string::npos);
  for (const std::int64_t columns : {4104, 16384}) {
    EXPECT_NE(refusal_of({9, columns, 64, true, true}).find("at most 4096 columns"), std::string::npos) << columns;
  }
  EXPECT_NE(refusal_of({1, 63, 8}).find("pieces of 16 bytes"), std::string::npos);
  EXPECT_NE(refusal_of({1, 60, 8, true}).find("pieces of 16 bytes"), std::string::npos);
  EXPECT_NE(refusal_of({1, 32768, 8, false, true}).find("shared memory"), std::string::npos);
}

}  // namespace
}  // namespace efla::test
