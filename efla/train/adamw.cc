#include "efla/train/adamw.h"

#include <memory>
#include <sstream>
#include <type_traits>

namespace efla::train {
namespace {

// LibTorch keys an optimizer's states by the parameter's address, written as text up to 1.13 and as a pointer in 2.x.
template <class Key>
Key state_key(const torch::Tensor& parameter) {
  if constexpr (std::is_pointer_v<Key>) {
    return parameter.unsafeGetTensorImpl();
  } else {
    std::ostringstream text;
    text << parameter.unsafeGetTensorImpl();
    return text.str();
  }
}

bool decays(const std::string& name, const torch::Tensor& parameter) {
  return parameter.dim() >= 2 && name.find("position") == std::string::npos;
}

}  // namespace

std::vector<torch::Tensor> tensors_of(const NamedParameters& parameters) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
  return tensors;
}

torch::optim::AdamW make_adamw(const NamedParameters& parameters, const TrainOptions& options) {
  std::vector<torch::Tensor> decaying, others;
  for (const auto& [name, parameter] : parameters) (decays(name, parameter) ? decaying : others).push_back(parameter);
  const auto defaults = torch::optim::AdamWOptions(options.lr).betas({0.9, 0.999}).eps(1e-8);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& [members, decay] : {std::pair(&decaying, options.weight_decay), std::pair(&others, 0.0)}) {
    auto group_options = std::make_unique<torch::optim::AdamWOptions>(defaults);
    group_options->weight_decay(decay);
    groups.emplace_back(*members, std::move(group_options));
  }
  return torch::optim::AdamW(std::move(groups), defaults);
}

void set_learning_rate(torch::optim::AdamW& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

torch::optim::AdamWParamState& adamw_state(torch::optim::AdamW& optimizer, const torch::Tensor& parameter) {
  auto& states = optimizer.state();
  using Key = typename std::decay_t<decltype(states)>::key_type;
  auto& state = states[state_key<Key>(parameter)];
  if (!state) {
    auto fresh = std::make_unique<torch::optim::AdamWParamState>();
    fresh->step(0).exp_avg(torch::zeros_like(parameter)).exp_avg_sq(torch::zeros_like(parameter));
    state = std::move(fresh);
  }
  return static_cast<torch::optim::AdamWParamState&>(*state);
}

}  // namespace efla::train
