#include "efla/nn/layers/mlp.h"

#include <torch/types.h>

#include "efla/autograd/layers/swiglu.h"

namespace efla::nn {

Mlp::Mlp(std::int64_t hidden, std::int64_t inner, const Initialiser& init) {
  const auto add = [&](const char* name, std::int64_t out, std::int64_t in) {
    return register_module(name, std::make_shared<Weight>(linear_weight(init.within(name), out, in)));
  };
  gate_proj_ = add("gate_proj", inner, hidden);
  up_proj_ = add("up_proj", inner, hidden);
  down_proj_ = add("down_proj", hidden, inner);
}

torch::Tensor Mlp::forward(const torch::Tensor& x) const {
  return autograd::swiglu_mlp(x, gate_proj_->value, up_proj_->value, down_proj_->value);
}

}  // namespace efla::nn
