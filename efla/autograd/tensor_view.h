// The only place where tensors become views, and the checks that this needs.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "efla/base/dtype.h"
#include "efla/base/error.h"
#include "efla/base/text.h"
#include "efla/base/view.h"

namespace efla::autograd {

template <class T>
constexpr at::ScalarType scalar_type() {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return at::kBFloat16;
  } else if constexpr (std::is_same_v<T, float16>) {
    return at::kHalf;
  } else if constexpr (std::is_same_v<T, double>) {
    return at::kDouble;
  } else {
    static_assert(std::is_same_v<T, float>);
    return at::kFloat;
  }
}

// Returns f(T{}), where T has the elements of a dtype: float or bfloat16, which the operators of layers take. Callers
// allow no other dtype.
template <class F>
auto with_dtype(at::ScalarType dtype, F&& f) {
  return dtype == at::kFloat ? f(float{}) : f(bfloat16{});
}

// Returns a view of the tensor's elements, which does not keep the tensor alive; a view without data for an undefined
// tensor. T, which may be const, must be the tensor's dtype and Rank its rank: call check_tensor first.
template <class T, int Rank>
View<T, Rank> view_of(const at::Tensor& tensor) {
  View<T, Rank> view;
  if (!tensor.defined()) return view;
  view.data = static_cast<T*>(tensor.data_ptr());
  std::copy_n(tensor.sizes().begin(), Rank, view.extent.begin());
  std::copy_n(tensor.strides().begin(), Rank, view.stride.begin());
  return view;
}

inline std::string shape_text(const at::Tensor& tensor) {
  return efla::shape_text(tensor.sizes().data(), static_cast<int>(tensor.dim()));
}

// Throws Error unless the tensor is on the device (the CPU or a GPU) and has the dtype and the rank; `axes` names its
// axes, for example "[B, T, H, K]".
inline void check_tensor(const char* operation, const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                         std::int64_t rank, const char* axes, const at::Device& device = at::kCPU) {
  if (!tensor.defined()) throw Error(operation, name, "an undefined tensor", std::string("a tensor ") + axes);
  if (tensor.device() != device || !(device.is_cpu() || device.is_cuda())) {
    throw Error(operation, name, "a tensor on " + tensor.device().str(),
                "one on " + (device.is_cuda() ? device.str() : "the CPU"));
  }
  if (tensor.dim() != rank) {
    throw Error(operation, name, "shape " + shape_text(tensor), std::string("shape ") + axes);
  }
  if (tensor.scalar_type() != dtype) {
    throw Error(operation, name, std::string("dtype ") + c10::toString(tensor.scalar_type()), c10::toString(dtype));
  }
}

// Throws Error unless the shape is `expected`.
inline void check_shape(const char* operation, const char* name, const at::Tensor& tensor, at::IntArrayRef expected) {
  if (tensor.sizes() == expected) return;
  throw Error(operation, name, "shape " + shape_text(tensor),
              "shape " + efla::shape_text(expected.data(), static_cast<int>(expected.size())));
}

// Throws Error unless cu_seqlens [N + 1] is int64 on the CPU, starts with 0, never decreases and ends with `tokens`,
// and unless `batch` is 1.
inline void check_cu_seqlens(const char* operation, const at::Tensor& cu_seqlens, std::int64_t batch,
                             std::int64_t tokens) {
  check_tensor(operation, "cu_seqlens", cu_seqlens, at::kLong, 1, "[N + 1]");
  if (batch != 1)
    throw Error(operation, "cu_seqlens", "a batch of " + std::to_string(batch), "one of packed sequences");
  std::int64_t last = 0;
  for (std::int64_t n = 0; n < cu_seqlens.size(0); ++n) {
    const std::int64_t end = cu_seqlens.data_ptr<std::int64_t>()[n * cu_seqlens.stride(0)];
    if (n == 0 ? end != 0 : end < last) {
      throw Error(operation, "cu_seqlens", std::to_string(end) + " at [" + std::to_string(n) + "]",
                  n == 0 ? "0" : "at least " + std::to_string(last) + ", where the sequence before ends");
    }
    last = end;
  }
  if (cu_seqlens.size(0) < 2 || last != tokens) {
    throw Error(operation, "cu_seqlens", "a last end at " + std::to_string(last),
                "the last at " + std::to_string(tokens));
  }
}

// Returns the tensor, or a copy of it if its last dimension is not contiguous.
inline at::Tensor with_contiguous_rows(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.size(-1) == 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// Returns x [..., D] as rows [N, D], without a copy where the strides allow; undefined stays undefined.
inline at::Tensor rows_of(const at::Tensor& x) {
  return x.defined() ? with_contiguous_rows(x.reshape({-1, x.size(-1)})) : x;
}

// Returns nullopt for an undefined tensor, because a LibTorch Function takes no undefined tensors.
inline c10::optional<at::Tensor> optional_of(const at::Tensor& tensor) {
  return tensor.defined() ? c10::optional<at::Tensor>(tensor) : c10::nullopt;
}

// Throws Error in the backward of a Function if its own gradient is asked for.
inline void refuse_second_order(const char* operation) {
  if (at::GradMode::is_enabled()) {
    throw Error(operation, "create_graph", "true", "false: only first derivatives are implemented");
  }
}

}  // namespace efla::autograd
