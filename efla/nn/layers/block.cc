#include "efla/nn/layers/block.h"

#include <torch/types.h>

#include <type_traits>

#include "efla/autograd/layers/add_rms_norm.h"

namespace efla::nn {

using torch::Tensor;

std::pair<Tensor, Tensor> add_and_norm(const Stream& stream, const Weight& weight, double eps) {
  return autograd::add_rms_norm(stream.x, stream.branch, weight.value, eps);
}

Block::Block(const BlockConfig& config, const Initialiser& init) : norm_eps_(config.norm_eps) {
  const std::string& name = config.mixer_name;
  const Initialiser part = init.within(name);
  const std::int64_t width = std::visit([](const auto& own) { return own.hidden; }, config.mixer);
  mixer_norm_ = add_norm(*this, name + "_norm", width);
  if (const auto* attention = std::get_if<AttentionConfig>(&config.mixer)) {
    mixer = register_module(name, std::make_shared<Attention>(*attention, part));
  } else if (const auto& own = std::get<MixerConfig>(config.mixer); mixer_preset(own.mixer).softmax) {
    mixer = register_module(name, std::make_shared<SoftmaxMixer>(own, part));
  } else if (mixer_preset(own.mixer).rwkv7) {
    mixer = register_module(name, std::make_shared<Rwkv7Mixer>(own, part));
  } else {
    mixer = register_module(name, std::make_shared<Mixer>(own, part));
  }
  if (config.mlp_width == 0) return;
  mlp_norm_ = add_norm(*this, "mlp_norm", width);
  mlp_ = register_module("mlp", std::make_shared<Mlp>(width, config.mlp_width, init.within("mlp")));
}

Stream Block::forward(const Stream& in, const Tensor& cu_seqlens) const {
  Tensor first_values = in.first_values;
  Stream out = forward(in, [&](const Tensor& normed) {
    const auto mix = [&]<class M>(const std::shared_ptr<M>& own) {
      if constexpr (std::is_same_v<M, Rwkv7Mixer>) {
        return own->forward(normed, cu_seqlens, first_values);
      } else {
        return own->forward(normed, cu_seqlens);
      }
    };
    return std::visit(mix, mixer);
  });
  out.first_values = first_values;
  return out;
}

Stream Block::forward(const Stream& in, const std::function<Tensor(const Tensor&)>& mix) const {
  const auto [x, mixer_input] = add_and_norm(in, *mixer_norm_, norm_eps_);
  const Stream mixed{x, mix(mixer_input)};
  if (!mlp_) return mixed;
  const auto [y, mlp_input] = add_and_norm(mixed, *mlp_norm_, norm_eps_);
  return {y, mlp_->forward(mlp_input)};
}

bool Block::waits_for_gpu() const {
  return std::visit([](const auto& own) { return own->waits_for_gpu(); }, mixer);
}

}  // namespace efla::nn
