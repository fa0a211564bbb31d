// Reads a tensor of a GPU without waiting for work that is launched later.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <optional>

namespace efla::libtorch {

// A copy of a GPU's tensor in the host's memory, made after the work that the current stream already has. A tensor on
// the CPU is not copied.
class HostCopy {
 public:
  explicit HostCopy(const at::Tensor& x);

  // Waits for the copy and returns it. Polls, because polling notices the end of a step the soonest.
  const at::Tensor& get();

 private:
  at::Tensor copy_;
  std::optional<c10::Event> arrived_;
};

}  // namespace efla::libtorch
