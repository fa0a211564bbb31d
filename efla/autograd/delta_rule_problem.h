// Conversions from tensors that the problems of whole sequences and of decode steps share.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "efla/base/dtype.h"
#include "efla/base/error.h"
#include "efla/rule/problem.h"

namespace efla::autograd {

// Returns g with `axes` axes, as rule/problem.h has it: an axis of length 1 is added to a scalar gate.
inline at::Tensor with_channels(const at::Tensor& g, std::int64_t axes) {
  return g.defined() && g.dim() == axes - 1 ? g.unsqueeze(-1) : g;
}

// Calls f with a value of the element type of q. Throws Error for other types; float16 is only taken on a GPU.
template <class F>
void with_element_type(const char* name, const at::Tensor& q, F&& f) {
  switch (q.scalar_type()) {
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(bfloat16{});
    case at::kDouble:
      return f(double{});
    case at::kHalf:
      if (q.is_cuda()) return f(float16{});
      [[fallthrough]];
    default:
      throw Error(name, "q", std::string("dtype ") + c10::toString(q.scalar_type()),
                  q.is_cuda() ? "Float, BFloat16, Half or Double" : "Float, BFloat16 or Double");
  }
}

// Returns the kind of decay of g: none if g is undefined, scalar if g has `scalar_axes` axes, otherwise channel.
inline Decay decay_of(const at::Tensor& g, std::int64_t scalar_axes) {
  if (!g.defined()) return Decay::none;
  return g.dim() == scalar_axes ? Decay::scalar : Decay::channel;
}

}  // namespace efla::autograd
