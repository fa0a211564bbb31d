// Memory that a caller lends to the kernels of a call.
#pragma once

#include <cstddef>

namespace efla::gpu {

// Memory of the device, aligned to 256 bytes. No other work may use it until the kernels of the call have ended.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

}  // namespace efla::gpu
