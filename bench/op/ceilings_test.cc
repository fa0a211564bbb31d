#include "bench/op/ceilings.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include "bench/machine.h"

namespace efla::bench {
namespace {

TEST(BenchCeilings, MatrixProductUsesItsThreadsWhateverTheBlasWasSetToBefore) {
  using GetThreads = int (*)();
  const auto blas_threads = reinterpret_cast<GetThreads>(dlsym(RTLD_DEFAULT, "openblas_get_num_threads"));
  if (blas_threads == nullptr) GTEST_SKIP() << "the BLAS is not OpenBLAS";
  const auto product = matrix_product(2);
  use_blas_threads(1);
  ASSERT_EQ(blas_threads(), 1);
  product();
  EXPECT_EQ(blas_threads(), 2);
}

}  // namespace
}  // namespace efla::bench
