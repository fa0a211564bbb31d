// Reading a tensor of a GPU without waiting for what is launched after it.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <optional>

namespace efla::autograd {

// A copy of a tensor in the host's memory, made after the work that the current stream already has.
class HostCopy {
 public:
  explicit HostCopy(const at::Tensor& x);

  // Returns the copy when it has arrived. Asks again and again, because that notices the end of a step the soonest.
  const at::Tensor& get();

 private:
  at::Tensor copy_;
  std::optional<c10::Event> arrived_;
};

}  // namespace efla::autograd
