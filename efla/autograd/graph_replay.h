// Work that repeats on a GPU, launched at once instead of kernel by kernel.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <vector>

namespace efla::autograd {

// Calls a function of one tensor. On a GPU the first call runs it, the second call captures it as a CUDA graph, and
// later calls replay that. The function must not wait for the GPU, and must do the same work for every input; what it
// reads and writes besides is either fixed or `held`, tensors that it updates in place. Not for several threads at
// once.
class GraphReplay {
 public:
  GraphReplay();
  ~GraphReplay();

  // Returns function(input), a tensor that the next call may overwrite. Begins anew where the input's shape or a tensor
  // of `held` is another one than in the call before. Without a GPU it calls the function.
  at::Tensor call(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input,
                  const std::vector<at::Tensor>& held);

 private:
  struct Captured;
  std::unique_ptr<Captured> captured_;
};

}  // namespace efla::autograd
