// libFuzzer's entry to one of the targets.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  efla::fuzz::EFLA_FUZZ_TARGET({data, size});
  return 0;
}
