#include "efla/autograd/cross_entropy.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>

#include "efla/autograd/tensor_view.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kCrossEntropy = "cross_entropy";

// Logits of a slice: 32 MiB of float32.
constexpr std::int64_t kSliceElements = std::int64_t{1} << 23;

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& targets,
                        bool needs_gradient) {
    const std::int64_t rows = x.size(0), step = std::max<std::int64_t>(1, kSliceElements / weight.size(0));
    const Tensor counts = targets.ne(kIgnoreIndex);
    const Tensor share = counts.sum().clamp_min(1).to(at::kFloat).reciprocal();  // of a token in the mean
    const Tensor dx = needs_gradient ? at::empty_like(x) : Tensor();
    Tensor dweight = needs_gradient ? at::zeros(weight.sizes(), weight.options().dtype(at::kFloat)) : Tensor();
    Tensor loss = at::zeros({}, x.options().dtype(at::kFloat));
    for (std::int64_t begin = 0; begin < rows; begin += step) {
      const auto slice = [&](const Tensor& t) { return t.slice(0, begin, std::min(rows, begin + step)); };
      const Tensor x_slice = slice(x), share_slice = slice(counts).to(at::kFloat).mul_(share).unsqueeze(1);  // [n, 1]
      const Tensor target = slice(targets).clamp_min(0).unsqueeze(1);
      Tensor log_probability = at::log_softmax(at::matmul(x_slice, weight.t()).to(at::kFloat), 1);  // [n, V]
      loss.sub_(log_probability.gather(1, target).mul_(share_slice).sum());
      if (!needs_gradient) continue;
      const Tensor dlogits = log_probability.exp_().mul_(share_slice).scatter_add_(1, target, -share_slice);
      slice(dx).copy_(at::matmul(dlogits.to(weight.scalar_type()), weight));
      dweight.addmm_(dlogits.t(), x_slice.to(at::kFloat));
    }
    if (needs_gradient) ctx->save_for_backward({dx, dweight.to(weight.scalar_type())});
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kCrossEntropy);
    const auto saved = ctx->get_saved_variables();
    return {saved[0] * grads[0].to(saved[0].scalar_type()), saved[1] * grads[0].to(saved[1].scalar_type()), {}, {}};
  }
};

}  // namespace

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets) {
  if (!x.defined() || x.dim() != 2) throw Error(kCrossEntropy, "x", x.defined() ? shape_text(x) : "nothing", "[N, D]");
  if (!weight.defined() || weight.dim() != 2 || weight.size(1) != x.size(1)) {
    throw Error(kCrossEntropy, "weight", weight.defined() ? shape_text(weight) : "nothing",
                "[V, " + std::to_string(x.size(1)) + "]");
  }
  if (!targets.defined() || targets.dim() != 1 || targets.size(0) != x.size(0) || targets.scalar_type() != at::kLong) {
    throw Error(kCrossEntropy, "targets", targets.defined() ? shape_text(targets) : "nothing",
                "int64 [" + std::to_string(x.size(0)) + "]");
  }
  const Tensor wrong = targets.ne(kIgnoreIndex).logical_and_(targets.lt(0).logical_or_(targets.ge(weight.size(0))));
  if (wrong.any().item<bool>()) {
    throw Error(kCrossEntropy, "targets", std::to_string(targets.masked_select(wrong)[0].item<std::int64_t>()),
                "0 to " + std::to_string(weight.size(0) - 1) + ", or " + std::to_string(kIgnoreIndex) +
                    " for a token that does not count");
  }
  const bool needs_gradient = at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  return CrossEntropyFunction::apply(x, weight, targets, needs_gradient);
}

}  // namespace efla::autograd
