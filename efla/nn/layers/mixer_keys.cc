#include "efla/nn/layers/mixer_keys.h"

#include <torch/types.h>

#include <utility>

namespace efla::nn {

using torch::Tensor;

MixerKeys::MixerKeys(SharedPlan plan, torch::nn::Module& mixer) : plan_(std::move(plan)) {
  if (plan_->preset.erase_key != EraseKey::closed_loop) return;
  decay_ = mixer.register_parameter("decay", torch::ones({plan_->config.heads}));
  correction_ = mixer.register_parameter("D", torch::ones({plan_->config.heads}));
}

Tensor MixerKeys::operator()(std::array<Tensor, 3>& heads, const SmallOutputs& small, const Tensor& g) const {
  auto& [q, k, v] = heads;
  const auto type = k.scalar_type();  // under autocast that of the projections
  if (plan_->preset.erase_key == EraseKey::gated) {
    v = v * torch::sigmoid(small.w).view(v.sizes()).to(type);
    return k * (plan_->config.beta_scale * torch::sigmoid(small.b)).view(k.sizes()).to(type);
  }
  q = q - k * (correction_ * torch::sigmoid(decay_)).unsqueeze(-1).to(type);
  return k * torch::exp(-g).unsqueeze(-1).to(type);
}

}  // namespace efla::nn
