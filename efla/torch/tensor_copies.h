// Copies of many tensors at once.
#pragma once

#include <ATen/ATen.h>
#include <torch/version.h>

#include <cstddef>
#include <vector>

namespace efla::libtorch {

// Copies of tensors, of each to one of the same shape. No tensor is both copied and written. A GPU makes all of the
// copies in few kernels.
class TensorCopies {
 public:
  using Tensors = std::vector<at::Tensor>;

  void add(const at::Tensor& from, const at::Tensor& to) {
    from_.push_back(from);
    to_.push_back(to);
  }
  void add(const Tensors& from, const Tensors& to) {
    from_.insert(from_.end(), from.begin(), from.end());
    to_.insert(to_.end(), to.begin(), to.end());
  }
  void make() const {
    if (to_.empty()) return;
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 1)
    at::_foreach_copy_(to_, from_);
#else
    for (std::size_t i = 0; i < to_.size(); ++i) to_[i].copy_(from_[i]);
#endif
  }

 private:
  Tensors from_, to_;
};

}  // namespace efla::libtorch
