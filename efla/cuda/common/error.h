// Checks calls of the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace efla {

// A call of the CUDA runtime or a kernel launch that failed: what was called, and the runtime's name and text of the
// error.
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& call, cudaError_t code);

  cudaError_t code() const { return code_; }

 private:
  cudaError_t code_;
};

namespace gpu {

// Throws CudaError unless `code`, the result of `call`, is cudaSuccess.
void check(cudaError_t code, const char* call);

// Throws CudaError where the launch of `kernel` just before failed.
void check_launch(const char* kernel);

}  // namespace gpu
}  // namespace efla
