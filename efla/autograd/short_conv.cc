#include "efla/autograd/short_conv.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "efla/autograd/tensor_view.h"
#include "efla/cpu/short_conv.h"
#include "efla/ops/delta.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kShortConv = "short_conv";

// [D, W] in float32, whatever the weight is.
Tensor taps_of(const Tensor& weight) { return weight.reshape({weight.size(0), weight.size(-1)}).to(at::kFloat); }

// The tokens [begin, end) of each sequence: all of them as one without cu_seqlens.
std::vector<std::pair<std::int64_t, std::int64_t>> sequences_of(const Tensor& cu_seqlens, std::int64_t tokens) {
  if (!cu_seqlens.defined()) return {{0, tokens}};
  std::vector<std::pair<std::int64_t, std::int64_t>> sequences;
  const auto* ends = cu_seqlens.data_ptr<std::int64_t>();
  for (std::int64_t n = 0; n + 1 < cu_seqlens.size(0); ++n) {
    if (ends[n] < ends[n + 1]) sequences.emplace_back(ends[n], ends[n + 1]);
  }
  return sequences;
}

template <class T>
void run_forward(const Tensor& x, const Tensor& taps, const Tensor& y) {
  cpu::short_conv(cpu::ShortConvForward<T>{view_of<const T, 3>(x), view_of<const float, 2>(taps), view_of<T, 3>(y)},
                  default_pool());
}

template <class T>
void run_backward(const Tensor& x, const Tensor& taps, const Tensor& dy, const Tensor& dx, const Tensor& dtaps) {
  cpu::short_conv(cpu::ShortConvBackward<T>{view_of<const T, 3>(x), view_of<const float, 2>(taps),
                                            view_of<const T, 3>(dy), view_of<T, 3>(dx), view_of<float, 2>(dtaps)},
                  default_pool());
}

struct ShortConvFunction : torch::autograd::Function<ShortConvFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x_any, const Tensor& weight, std::int64_t rest,
                               const OptionalTensor& given_cu_seqlens) {
    const Tensor cu_seqlens = given_cu_seqlens.value_or(Tensor());
    const Tensor x = with_contiguous_rows(x_any);
    const std::int64_t channels = weight.size(0);
    const Tensor y = at::empty({x.size(0), x.size(1), channels}, x.options());
    const Tensor columns = x.narrow(2, 0, channels), taps = taps_of(weight);
    for (const auto& [begin, end] : sequences_of(cu_seqlens, x.size(1))) {
      const Tensor from = columns.slice(1, begin, end), to = y.slice(1, begin, end);
      if (x.scalar_type() == at::kFloat) {
        run_forward<float>(from, taps, to);
      } else {
        run_forward<bfloat16>(from, taps, to);
      }
    }
    ctx->save_for_backward({x, weight, cu_seqlens});
    ctx->set_materialize_grads(false);
    return {y, x.narrow(2, channels, rest).clone(at::MemoryFormat::Contiguous)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kShortConv);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], taps = taps_of(weight);
    const std::int64_t channels = weight.size(0);
    const Tensor dx = at::empty(x.sizes(), x.options());
    const Tensor columns = x.narrow(2, 0, channels), dcolumns = dx.narrow(2, 0, channels);
    const Tensor dy = grads[0].defined() ? with_contiguous_rows(grads[0]) : at::zeros_like(columns);
    Tensor dtaps;
    for (const auto& [begin, end] : sequences_of(saved[2], x.size(1))) {
      const Tensor part = at::empty(taps.sizes(), taps.options());
      const auto tokens = [begin = begin, end = end](const Tensor& t) { return t.slice(1, begin, end); };
      if (x.scalar_type() == at::kFloat) {
        run_backward<float>(tokens(columns), taps, tokens(dy), tokens(dcolumns), part);
      } else {
        run_backward<bfloat16>(tokens(columns), taps, tokens(dy), tokens(dcolumns), part);
      }
      dtaps = dtaps.defined() ? dtaps.add_(part) : part;
    }
    if (!dtaps.defined()) dtaps = at::zeros(taps.sizes(), taps.options());
    Tensor tail = dx.narrow(2, channels, x.size(2) - channels);
    if (tail.size(2) > 0) {
      tail.zero_();
      if (grads[1].defined()) tail.narrow(2, 0, grads[1].size(2)).copy_(grads[1]);
    }
    return {dx, dtaps.to(weight.scalar_type()).reshape(weight.sizes()), {}, {}};
  }
};

}  // namespace

std::pair<Tensor, Tensor> short_conv_split(const Tensor& x, const Tensor& weight, std::int64_t rest,
                                           const Tensor& cu_seqlens) {
  RECORD_USER_SCOPE("efla::short_conv");
  if (!x.defined()) throw Error(kShortConv, "x", "an undefined tensor", "a tensor [B, T, D]");
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16) {
    throw Error(kShortConv, "x", std::string("dtype ") + c10::toString(x.scalar_type()), "Float or BFloat16");
  }
  check_tensor(kShortConv, "x", x, x.scalar_type(), 3, "[B, T, D]");
  if (!weight.defined()) throw Error(kShortConv, "weight", "an undefined tensor", "a tensor [D, W]");
  const bool middle = weight.dim() == 3 && weight.size(1) == 1;
  if (!(weight.dim() == 2 || middle) || weight.size(-1) < 1 || weight.size(-1) > cpu::kMaxConvWidth) {
    throw Error(kShortConv, "weight", "shape " + shape_text(weight),
                "[D, W] or [D, 1, W] with W from 1 to " + std::to_string(cpu::kMaxConvWidth));
  }
  check_tensor(kShortConv, "weight", weight, weight.scalar_type(), weight.dim(), "[D, W]");
  if (rest < 0 || weight.size(0) + rest > x.size(2)) {
    throw Error(
        kShortConv, "x", "shape " + shape_text(x),
        "at least " + std::to_string(weight.size(0) + rest) + " columns (weight has shape " + shape_text(weight) + ")");
  }
  if (cu_seqlens.defined()) check_cu_seqlens(kShortConv, cu_seqlens, x.size(0), x.size(1));
  auto out = ShortConvFunction::apply(x, weight, rest,
                                      optional_of(cu_seqlens.defined() ? cu_seqlens.contiguous() : cu_seqlens));
  return {out[0], out[1]};
}

Tensor short_conv(const Tensor& x, const Tensor& weight) {
  auto y = short_conv_split(x, weight, 0).first;
  if (y.size(2) != x.size(2)) check_shape(kShortConv, "x", x, y.sizes());
  return y;
}

TORCH_LIBRARY_FRAGMENT(efla, library) { library.def("short_conv(Tensor x, Tensor weight) -> Tensor", short_conv); }

}  // namespace efla::autograd
