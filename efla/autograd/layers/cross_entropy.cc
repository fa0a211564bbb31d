#include "efla/autograd/layers/cross_entropy.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>

#include "efla/autograd/tensor_view.h"
#include "efla/ops/layers/cross_entropy.h"
#include "efla/torch/autocast.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kCrossEntropy = "cross_entropy";

// Returns the number of logits per slice: few enough to stay in the CPU's caches, or enough to fill a GPU.
std::int64_t slice_elements(const Tensor& x) { return std::int64_t{1} << (x.device().is_cpu() ? 23 : 27); }

// Replaces logits [n, V] by the gradient of share · Σ −log p(targets), if there is a share. Returns the losses [n].
template <class T>
Tensor fused(const Tensor& logits, const Tensor& targets, const Tensor& share) {
  const Tensor loss = at::empty(targets.sizes(), logits.options().dtype(at::kFloat));
  cross_entropy(CrossEntropy<T>{view_of<T, 2>(logits), view_of<const std::int64_t, 1>(targets),
                                view_of<const float, 1>(share), view_of<float, 1>(loss)},
                {.context = libtorch::context_of(logits)});
  return loss;
}

// Does the same with LibTorch's operators.
Tensor composite(Tensor& logits, const Tensor& targets, const Tensor& share) {
  const Tensor counts = targets.ne(kIgnoreIndex).unsqueeze(1), target = targets.clamp_min(0).unsqueeze(1);  // [n, 1]
  Tensor log_probability = at::log_softmax(logits, 1, at::kFloat);
  const Tensor loss = -log_probability.gather(1, target).mul_(counts).squeeze(1);
  if (!share.defined()) return loss;
  const Tensor factor = counts.to(at::kFloat).mul_(share);
  logits = log_probability.exp_().mul_(factor).scatter_add_(1, target, -factor).to(logits.scalar_type());
  return loss;
}

Tensor losses_of(Tensor& logits, const Tensor& targets, const Tensor& share) {
  const at::ScalarType dtype = logits.scalar_type();
  const bool has_kernel =
      logits.is_cuda() && libtorch::has_gpu_kernels() && (dtype == at::kFloat || dtype == at::kBFloat16);
  if (!has_kernel) return composite(logits, targets, share);
  return with_dtype(dtype, [&]<class T>(T) { return fused<T>(logits, targets, share); });
}

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  // Products are in `type`, everything else is in float32.
  static Tensor forward(AutogradContext* ctx, const Tensor& given_x, const Tensor& given_weight, const Tensor& targets,
                        bool needs_gradient, at::ScalarType type) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor x = given_x.to(type), weight = given_weight.to(type);
    const std::int64_t rows = x.size(0), step = std::max<std::int64_t>(1, slice_elements(x) / weight.size(0));
    // The weight of a token in the mean, [1].
    const Tensor share = targets.ne(kIgnoreIndex).sum(0, true).clamp_min(1).to(at::kFloat).reciprocal();
    const Tensor dx = needs_gradient ? at::empty_like(x) : Tensor();
    Tensor dweight = needs_gradient ? at::zeros(weight.sizes(), weight.options().dtype(at::kFloat)) : Tensor();
    Tensor loss = at::zeros({1}, x.options().dtype(at::kFloat));
    for (std::int64_t begin = 0; begin < rows; begin += step) {
      const auto slice = [&](const Tensor& t) { return t.slice(0, begin, std::min(rows, begin + step)); };
      const Tensor x_slice = slice(x);
      Tensor logits = at::matmul(x_slice, weight.t());  // [n, V], later their gradient
      loss.add_(losses_of(logits, slice(targets), needs_gradient ? share : Tensor()).sum());
      if (!needs_gradient) continue;
      slice(dx).copy_(at::matmul(logits, weight));
      if (type == at::kFloat) {
        dweight.addmm_(logits.t(), x_slice);
      } else {
        dweight.add_(at::matmul(logits.t(), x_slice));
      }
    }
    if (needs_gradient) ctx->save_for_backward({dx.to(given_x.scalar_type()), dweight.to(given_weight.scalar_type())});
    return loss.mul_(share).squeeze(0);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order(kCrossEntropy);
    const auto saved = ctx->get_saved_variables();
    // The product is at least in float32, because a factor rounded to bfloat16 would give whole parts of a batch a
    // wrong weight.
    const auto scaled = [&](const Tensor& t) {
      return (t.to(c10::promoteTypes(t.scalar_type(), at::kFloat)) * grads[0]).to(t.scalar_type());
    };
    return {scaled(saved[0]), scaled(saved[1]), {}, {}, {}};
  }
};

}  // namespace

void check_targets(const Tensor& targets, std::int64_t classes) {
  const Tensor wrong = targets.ne(kIgnoreIndex).logical_and_(targets.lt(0).logical_or_(targets.ge(classes)));
  if (!wrong.any().item<bool>()) return;
  throw Error(kCrossEntropy, "targets", std::to_string(targets.masked_select(wrong)[0].item<std::int64_t>()),
              "0 to " + std::to_string(classes - 1) + ", or " + std::to_string(kIgnoreIndex) +
                  " for a token that does not count");
}

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
  if (targets.is_cpu()) check_targets(targets, weight.size(0));
  const bool needs_gradient = at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  return CrossEntropyFunction::apply(x, weight, targets, needs_gradient, libtorch::product_type(x));
}

}  // namespace efla::autograd
