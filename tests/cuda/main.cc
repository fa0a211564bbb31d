// Runs the tests where there is a GPU; elsewhere says that it runs none.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tests/cuda/device.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const std::string why = efla::test::why_no_gpu(); !why.empty()) {
    std::printf("SKIPPED ALL: the kernels are compiled but no GPU runs them here (%s)\n", why.c_str());
    return 0;
  }
  return RUN_ALL_TESTS();
}
