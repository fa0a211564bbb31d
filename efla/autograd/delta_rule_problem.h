// Conversions from tensors that the problems of whole sequences and of decode steps share.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "efla/autograd/tensor_view.h"
#include "efla/base/dtype.h"
#include "efla/base/error.h"
#include "efla/base/view.h"
#include "efla/rule/problem.h"

namespace efla::autograd {

// Returns a view of g with `Rank` axes, as rule/problem.h has it: a scalar gate gets an axis of length 1.
template <class T, int Rank>
View<T, Rank> view_of_gate(const at::Tensor& g) {
  if (!g.defined() || g.dim() == Rank) return view_of<T, Rank>(g);
  const auto per_head = view_of<T, Rank - 1>(g);
  View<T, Rank> view{.data = per_head.data};
  std::copy_n(per_head.extent.begin(), Rank - 1, view.extent.begin());
  std::copy_n(per_head.stride.begin(), Rank - 1, view.stride.begin());
  view.extent[Rank - 1] = view.stride[Rank - 1] = 1;
  return view;
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
