#include "efla/cuda/common/error.h"

namespace efla {

CudaError::CudaError(const std::string& call, cudaError_t code)
    : std::runtime_error(call + ": " + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) + ")"), code_(code) {}

namespace gpu {

void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw CudaError(call, code);
}

void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

}  // namespace gpu
}  // namespace efla
