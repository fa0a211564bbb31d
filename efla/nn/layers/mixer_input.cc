#include "efla/nn/layers/mixer_input.h"

#include <torch/types.h>

#include <span>
#include <utility>

#include "efla/autograd/layers/linear.h"
#include "efla/autograd/layers/short_conv.h"
#include "efla/base/check.h"

namespace efla::nn {
namespace {

using torch::Tensor;

// GPUs multiply matrices fastest if the length of rows is a multiple of 16 bytes, which are 8 bfloat16 numbers.
constexpr std::int64_t kColumns = 8;

Tensor activation(const std::string& name, const Tensor& x) {
  if (name == "silu") return torch::silu(x);
  if (name == "relu") return torch::relu(x);
  if (name == "elu") return torch::elu(x) + 1.0;
  return x;
}

// Computes a depthwise causal convolution without activation. x is [B, T, C], taps [C, 1, W].
Tensor plain_conv(const Tensor& x, const Tensor& taps) {
  const std::int64_t width = taps.size(2), tokens = x.size(1);
  const auto padded = torch::constant_pad_nd(x, {0, 0, width - 1, 0});
  Tensor sum;
  for (std::int64_t j = 0; j < width; ++j) {
    const auto term = padded.narrow(1, j, tokens) * taps.select(2, j).squeeze(-1);
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

Tensor plain_conv(const Tensor& x, const Tensor& taps, const Tensor& cu_seqlens) {
  if (!cu_seqlens.defined()) return plain_conv(x, taps);
  std::vector<Tensor> parts;
  for (std::int64_t n = 0; n + 1 < cu_seqlens.size(0); ++n) {
    parts.push_back(
        plain_conv(x.slice(1, cu_seqlens[n].item<std::int64_t>(), cu_seqlens[n + 1].item<std::int64_t>()), taps));
  }
  return torch::cat(parts, 1);
}

}  // namespace

PackedWindows::PackedWindows(Tensor given, std::int64_t tokens, std::int64_t conv) : cu_seqlens(std::move(given)) {
  if (conv == 0) return;
  const std::int64_t count = cu_seqlens.size(0) - 1, kept = conv - 1;
  const auto numbers = [&](std::int64_t begin, std::int64_t end) {
    return torch::arange(begin, end, cu_seqlens.options());
  };
  const auto sequences_of = [&](const Tensor& rows, const Tensor& all_ends) {
    return torch::searchsorted(all_ends.narrow(0, 1, count), rows, /*out_int32=*/false, /*right=*/true);
  };
  ends = cu_seqlens + kept * numbers(0, count + 1);
  const auto rows = numbers(0, tokens + count * kept), sequences = sequences_of(rows, ends);
  const auto place = rows - ends.index_select(0, sequences);  // in the window
  sources = torch::where(place < kept, kept * sequences + place, rows + kept * (count - 1 - sequences));
  const auto inputs = numbers(0, tokens);
  outputs = inputs + kept * (sequences_of(inputs, cu_seqlens) + 1);
  last = (ends.narrow(0, 1, count).unsqueeze(1) + numbers(-kept, 0)).flatten();
}

SharedPlan begin_mixer(const MixerConfig& config, bool softmax, torch::nn::Module& mixer, const Initialiser& init) {
  validate(config);
  auto plan = std::make_shared<const MixerPlan>(config);
  Require("mixer")(plan->preset.softmax == softmax && !plan->preset.rwkv7, "mixer", "'" + config.mixer + "'",
                   softmax ? "softmax" : "a delta rule");
  for (const auto& [name, columns] : plan->joint().first(MixerPlan::kQkv)) {
    add_projection(mixer, init, name, columns.count, config.hidden);
  }
  return plan;
}

JointProjection::JointProjection(const MixerPlan& plan, const torch::nn::Module& mixer) {
  const auto parameters = mixer.named_parameters();
  for (const auto& projection : plan.joint()) weights_.push_back(parameters[projection.name + ".weight"]);
}

Tensor JointProjection::operator()(const Tensor& x) const {
  auto parts = weights_;
  std::int64_t outputs = 0;
  for (const auto& weight : parts) outputs += weight.size(0);
  const std::int64_t beyond = outputs % kColumns;
  if (x.is_cuda() && beyond != 0) {
    parts.push_back(torch::zeros({kColumns - beyond, parts[0].size(1)}, parts[0].options()));
  }
  return autograd::linear(x, torch::cat(parts));
}

Tensor JointProjection::one_by_one(const Tensor& x) const {
  std::vector<Tensor> parts;
  for (const auto& weight : weights_) parts.push_back(autograd::linear(x, weight));
  return torch::cat(parts, 2);
}

QkvConvolution::QkvConvolution(SharedPlan plan, torch::nn::Module& mixer, const Initialiser& init)
    : plan_(std::move(plan)) {
  const std::int64_t taps = plan_->config.conv;
  if (taps == 0) return;
  const auto add = [&](const char* name, std::int64_t channels) {
    return mixer.register_module(name, std::make_shared<Weight>(init.within(name).weight({channels, 1, taps}, taps)));
  };
  q_ = add("q_conv1d", plan_->keys());
  k_ = add("k_conv1d", plan_->step_keys());
  v_ = add("v_conv1d", plan_->step_values());
}

Tensor QkvConvolution::taps() const { return torch::cat({q_->value, k_->value, v_->value}); }

std::array<Tensor, 3> QkvConvolution::heads_of(const Tensor& qkv) const {
  const auto& config = plan_->config;
  const std::int64_t keys = plan_->keys(), n = plan_->steps();
  const auto steps_of = [&](std::int64_t first, std::int64_t count, std::int64_t heads, std::int64_t dim) {
    const Tensor part = qkv.narrow(2, first, count);
    return n == 1 ? part.unflatten(2, {heads, dim}) : part.unflatten(2, {n, heads, dim}).flatten(1, 2);
  };
  return {qkv.narrow(2, 0, keys).unflatten(2, {config.heads, config.key_dim}),
          steps_of(keys, plan_->step_keys(), config.heads, config.key_dim),
          steps_of(keys + plan_->step_keys(), plan_->step_values(), config.value_heads, config.value_dim)};
}

Tensor QkvConvolution::activated(const Tensor& qkv) const {
  if (plan_->config.qk_activation == "silu") return torch::silu(qkv);
  const std::int64_t keys = plan_->keys() + plan_->step_keys();  // of q and k
  const auto qk = activation(plan_->config.qk_activation, qkv.narrow(2, 0, keys));
  return torch::cat({qk, torch::silu(qkv.narrow(2, keys, plan_->step_values()))}, 2);
}

Tensor QkvConvolution::sum_normed(const Tensor& qkv) const {
  const std::int64_t keys = plan_->keys();
  const auto qk = qkv.narrow(2, 0, 2 * keys).unflatten(2, {2 * plan_->config.heads, plan_->config.key_dim});
  const auto normed = (qk / qk.abs().sum(-1, true).clamp_min(1e-6)).flatten(2);
  return torch::cat({normed, qkv.narrow(2, 2 * keys, plan_->values())}, 2);
}

std::pair<Tensor, Tensor> QkvConvolution::operator()(const Tensor& projected, const Tensor& cu_seqlens) const {
  const auto& config = plan_->config;
  std::pair<Tensor, Tensor> result;
  if (config.conv > 0 && config.qk_activation == "silu") {
    result = autograd::short_conv_split(projected, taps(), cu_seqlens);
  } else {
    const auto qkv = projected.narrow(2, 0, plan_->channels());
    result = {activated(config.conv > 0 ? plain_conv(qkv, taps(), cu_seqlens) : qkv),
              projected.slice(2, plan_->channels())};
  }
  if (config.qk_sum_norm) result.first = sum_normed(result.first);
  return result;
}

}  // namespace efla::nn
