#include "efla/cuda/common/launch.h"

#include <cstdint>
#include <limits>
#include <string>

#include "efla/base/error.h"
#include "efla/cuda/common/error.h"

namespace efla::gpu {

bool is_hopper() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return major == 9;
}

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

bool has_shared_memory(std::size_t bytes) {
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes <= static_cast<std::size_t>(most);
}

unsigned grid_of(const char* operation, std::int64_t blocks) {
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    throw Error(operation, "sizes B, HV, V", std::to_string(blocks) + " thread blocks", "at most 2^31 - 1");
  }
  return static_cast<unsigned>(blocks);
}

void require_workspace(const char* operation, const Workspace& workspace, std::size_t needed) {
  if (workspace.bytes < needed || reinterpret_cast<std::uintptr_t>(workspace.data) % 256 != 0) {
    throw Error(operation, "workspace", std::to_string(workspace.bytes) + " bytes",
                "at least " + std::to_string(needed) + " bytes, aligned to 256");
  }
}

}  // namespace efla::gpu
