#include "efla/torch/host_copy.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace efla::libtorch {

HostCopy::HostCopy(const at::Tensor& x) : copy_(x) {
  if (!x.is_cuda()) return;
  copy_ = at::empty(x.sizes(), x.options().device(at::kCPU).pinned_memory(true));
  copy_.copy_(x, /*non_blocking=*/true);
  arrived_.emplace(x.device().type());
  arrived_->record(c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device()));
}

const at::Tensor& HostCopy::get() {
  while (arrived_ && !arrived_->query()) {
  }
  return copy_;
}

}  // namespace efla::libtorch
