// Work that repeats on a GPU, launched at once instead of kernel by kernel.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <vector>

namespace efla::autograd {

// Calls a function of tensors. On a GPU the first call with tensors of some shapes runs it, the second captures it as a
// CUDA graph, and later ones replay that. The function must not wait for the GPU, and must do the same work for every
// input of the same shapes; what it reads and writes besides is fixed, or `held`: tensors that it updates in place. On
// a GPU not for several threads at once.
class GraphReplay {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Function = std::function<Tensors(const Tensors&)>;

  GraphReplay();
  ~GraphReplay();

  // Returns function(inputs), tensors that the next call may overwrite. Forgets everything where a tensor of `held` is
  // another one than in the call before. Without a GPU it calls the function.
  Tensors call(const Function& function, const Tensors& inputs, const Tensors& held);

 private:
  struct Captured;
  struct Pool;
  std::unique_ptr<Pool> pool_;                       // the memory of all graphs
  std::vector<std::unique_ptr<Captured>> captured_;  // by the shapes of the inputs
  Tensors held_;                                     // kept alive, so that no other tensor can have their addresses
};

}  // namespace efla::autograd
