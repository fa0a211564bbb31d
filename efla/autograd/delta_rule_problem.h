// What the problems of whole sequences and of decode steps take from tensors in the same way.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "efla/base/dtype.h"
#include "efla/base/error.h"
#include "efla/rule/problem.h"

namespace efla::autograd {

// Returns g with an axis of channels, as the contract has it.
inline at::Tensor with_channels(const at::Tensor& g, std::int64_t axes) {
  return g.defined() && g.dim() == axes - 1 ? g.unsqueeze(-1) : g;
}

// Calls f with a value of the element type of q. float16 is taken on a GPU alone.
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

// Returns what g decays: nothing where it is undefined, a head where it has `scalar_axes` axes, a key channel where it
// has one more.
inline Decay decay_of(const at::Tensor& g, std::int64_t scalar_axes) {
  if (!g.defined()) return Decay::none;
  return g.dim() == scalar_axes ? Decay::scalar : Decay::channel;
}

}  // namespace efla::autograd
