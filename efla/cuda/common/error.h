// Checks of calls of the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace efla {

// The failure of a call of the CUDA runtime or of a kernel launch. The message has the name of the call or kernel, and
// the runtime's name and text of the error.
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

// Throws CudaError if the launch of `kernel` just before this call failed.
void check_launch(const char* kernel);

}  // namespace gpu
}  // namespace efla
