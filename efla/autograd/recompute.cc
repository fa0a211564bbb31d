#include "efla/autograd/recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>

#include "efla/autograd/tensor_view.h"
#include "efla/torch/autocast.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Kept : torch::CustomClassHolder {
  std::function<Tensor(const Tensor&)> f;
  std::vector<Tensor> parameters;
  bool x_needs_gradient;
  bool autocast;  // whether the forward used autocast; the backward does the same

  Kept(std::function<Tensor(const Tensor&)> function, std::vector<Tensor> leaves, const Tensor& x)
      : f(std::move(function)),
        parameters(std::move(leaves)),
        x_needs_gradient(x.requires_grad()),
        autocast(libtorch::product_type(x) != x.scalar_type()) {}
};

struct RecomputeFunction : torch::autograd::Function<RecomputeFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const at::TensorList& /*parameters*/,
                        const c10::intrusive_ptr<Kept>& kept) {
    ctx->save_for_backward({x});
    ctx->saved_data["kept"] = at::IValue::make_capsule(kept);
    // With gradients, as in the backward, so that both have the same bits: without gradients a product may add in
    // another order. The graph is dropped on return.
    const at::AutoGradMode with_gradient(true);
    return kept->f(x.detach().requires_grad_(kept->x_needs_gradient)).detach();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order("recompute");
    const auto kept = c10::static_intrusive_pointer_cast<Kept>(ctx->saved_data["kept"].toCapsule());
    const Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_(kept->x_needs_gradient);
    Tensor y;
    {
      const at::AutoGradMode with_gradient(true);
      const auto precision = kept->autocast ? std::make_unique<libtorch::Bfloat16OnGpu>() : nullptr;
      y = kept->f(x);
    }
    variable_list inputs = kept->parameters;
    if (kept->x_needs_gradient) inputs.insert(inputs.begin(), x);
    auto gradients = torch::autograd::grad({y}, inputs, grads, /*retain_graph=*/false, /*create_graph=*/false,
                                           /*allow_unused=*/true);
    if (!kept->x_needs_gradient) gradients.insert(gradients.begin(), Tensor());
    gradients.emplace_back();  // of kept
    return gradients;
  }
};

}  // namespace

Tensor recompute(const std::function<Tensor(const Tensor&)>& f, const Tensor& x,
                 const std::vector<Tensor>& parameters) {
  if (!at::GradMode::is_enabled()) return f(x);
  return RecomputeFunction::apply(x, at::TensorList(parameters), c10::make_intrusive<Kept>(f, parameters, x));
}

}  // namespace efla::autograd
