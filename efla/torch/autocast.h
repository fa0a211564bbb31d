// Autocast: matrix products in half precision while parameters stay float32.
#pragma once

#include <ATen/core/Tensor.h>

namespace efla::libtorch {

// Runs matrix products of float32 parameters in bfloat16 on the GPU, on this thread, while the object lives.
class Bfloat16OnGpu {
 public:
  Bfloat16OnGpu();
  ~Bfloat16OnGpu();
  Bfloat16OnGpu(const Bfloat16OnGpu&) = delete;
  Bfloat16OnGpu& operator=(const Bfloat16OnGpu&) = delete;
};

// Returns the type in which products of x are computed: the type of autocast if x is on a GPU and autocast is on for
// this thread, otherwise the type of x.
at::ScalarType product_type(const at::Tensor& x);

}  // namespace efla::libtorch
