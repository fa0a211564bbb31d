#include "efla/autograd/layers/short_conv.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/short_conv.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kShortConv = "short_conv";

// Returns the weight as [D, W] in float32.
Tensor taps_of(const Tensor& weight) { return weight.reshape({weight.size(0), weight.size(-1)}).to(at::kFloat); }

View<const std::int64_t, 1> view_of_cu_seqlens(const Tensor& cu_seqlens) {
  return view_of<const std::int64_t, 1>(cu_seqlens);
}

template <class T>
void run_forward(const Tensor& x, const Tensor& taps, const Tensor& cu_seqlens, const Tensor& y) {
  short_conv_forward(ShortConvForward<T>{view_of<const T, 3>(x), view_of<const float, 2>(taps), view_of<T, 3>(y),
                                         view_of_cu_seqlens(cu_seqlens)},
                     {.context = libtorch::context_of(x)});
}

template <class T>
void run_backward(const Tensor& x, const Tensor& taps, const Tensor& cu_seqlens, const Tensor& dy, const Tensor& dx,
                  const Tensor& dtaps) {
  short_conv_backward(
      ShortConvBackward<T>{view_of<const T, 3>(x), view_of<const float, 2>(taps), view_of<const T, 3>(dy),
                           view_of<T, 3>(dx), view_of<float, 2>(dtaps), view_of_cu_seqlens(cu_seqlens)},
      {.context = libtorch::context_of(x)});
}

struct ShortConvFunction : torch::autograd::Function<ShortConvFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x_any, const Tensor& weight,
                               const OptionalTensor& given_cu_seqlens) {
    const Tensor cu_seqlens = given_cu_seqlens.value_or(Tensor());
    const Tensor x = with_contiguous_rows(x_any);
    const std::int64_t channels = weight.size(0);
    const Tensor y = at::empty({x.size(0), x.size(1), channels}, x.options());
    const Tensor columns = x.narrow(2, 0, channels), taps = taps_of(weight);
    with_dtype(x.scalar_type(), [&]<class T>(T) { run_forward<T>(columns, taps, cu_seqlens, y); });
    ctx->save_for_backward({x, weight, cu_seqlens});
    ctx->set_materialize_grads(false);
    return {y, x.narrow(2, channels, x.size(2) - channels).clone(at::MemoryFormat::Contiguous)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kShortConv);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], taps = taps_of(weight);
    const std::int64_t channels = weight.size(0);
    const Tensor dx = at::empty(x.sizes(), x.options());
    const Tensor columns = x.narrow(2, 0, channels), dcolumns = dx.narrow(2, 0, channels);
    const Tensor dy = grads[0].defined() ? with_contiguous_rows(grads[0]) : at::zeros_like(columns);
    const Tensor dtaps = at::empty(taps.sizes(), taps.options());
    with_dtype(x.scalar_type(), [&]<class T>(T) { run_backward<T>(columns, taps, saved[2], dy, dcolumns, dtaps); });
    Tensor tail = dx.narrow(2, channels, x.size(2) - channels);
    if (grads[1].defined()) {
      tail.copy_(grads[1]);
    } else {
      tail.zero_();
    }
    return {dx, dtaps.to(weight.scalar_type()).reshape(weight.sizes()), {}};
  }
};

}  // namespace

std::pair<Tensor, Tensor> short_conv_split(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens) {
  RECORD_USER_SCOPE("efla::short_conv");
  if (!x.defined()) throw Error(kShortConv, "x", "an undefined tensor", "a tensor [B, T, D]");
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16) {
    throw Error(kShortConv, "x", std::string("dtype ") + c10::toString(x.scalar_type()), "Float or BFloat16");
  }
  check_tensor(kShortConv, "x", x, x.scalar_type(), 3, "[B, T, D]", x.device());
  if (!weight.defined()) throw Error(kShortConv, "weight", "an undefined tensor", "a tensor [D, W]");
  const bool middle = weight.dim() == 3 && weight.size(1) == 1;
  if (!(weight.dim() == 2 || middle) || weight.size(-1) < 1 || weight.size(-1) > kMaxConvWidth) {
    throw Error(kShortConv, "weight", "shape " + shape_text(weight),
                "[D, W] or [D, 1, W] with W from 1 to " + std::to_string(kMaxConvWidth));
  }
  check_tensor(kShortConv, "weight", weight, weight.scalar_type(), weight.dim(), "[D, W]", x.device());
  if (weight.size(0) > x.size(2)) {
    throw Error(
        kShortConv, "x", "shape " + shape_text(x),
        "at least " + std::to_string(weight.size(0)) + " columns (weight has shape " + shape_text(weight) + ")");
  }
  if (cu_seqlens.defined()) check_tensor(kShortConv, "cu_seqlens", cu_seqlens, at::kLong, 1, "[N + 1]", x.device());
  auto out = ShortConvFunction::apply(x, weight, optional_of(cu_seqlens));
  return {out[0], out[1]};
}

Tensor short_conv(const Tensor& x, const Tensor& weight) {
  auto y = short_conv_split(x, weight).first;
  if (y.size(2) != x.size(2)) check_shape(kShortConv, "x", x, y.sizes());
  return y;
}

TORCH_LIBRARY_FRAGMENT(efla, library) { library.def("short_conv(Tensor x, Tensor weight) -> Tensor", short_conv); }

}  // namespace efla::autograd
