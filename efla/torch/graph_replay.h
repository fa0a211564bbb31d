// Launches repeated work on a GPU as one CUDA graph instead of kernel by kernel.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <vector>

namespace efla::libtorch {

// Calls a function of tensors. On a GPU the first call with inputs of some shapes runs the function, the second call
// captures the function as a CUDA graph, and this call and later calls replay the graph. All these calls compute in the
// same memory, which the object keeps, so that they need no more than the largest of them. The function must not wait
// for the GPU, and must do the same work for all inputs of the same shapes. Other tensors that it reads and writes must
// always be the same, or be among the tensors `held`, which it may update in place. On a GPU only one thread may use
// the object at a time.
class GraphReplay {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Function = std::function<Tensors(const Tensors&)>;

  GraphReplay();
  ~GraphReplay();

  // Returns function(inputs). The next call may overwrite these tensors. Drops all graphs if `held` has another tensor
  // than in the previous call. Without a GPU only calls the function.
  Tensors call(const Function& function, const Tensors& inputs, const Tensors& held);

 private:
  struct Captured;
  struct Pool;
  std::unique_ptr<Pool> pool_;                       // the memory of all graphs
  std::vector<std::unique_ptr<Captured>> captured_;  // by the shapes of the inputs
  Tensors held_;                                     // kept alive, so that no other tensor can have their addresses
};

}  // namespace efla::libtorch
