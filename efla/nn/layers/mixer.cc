#include "efla/nn/layers/mixer.h"

#include <torch/types.h>

#include <cmath>

#include "efla/autograd/delta_rule.h"
#include "efla/autograd/rms_norm.h"
#include "efla/autograd/short_conv.h"
#include "efla/base/error.h"

namespace efla::nn {
namespace {

constexpr std::int64_t kMaxTaps = 8, kMaxWidth = 1 << 16;

std::shared_ptr<Weight> projection_weight(Mixer& mixer, const Initialiser& init, const std::string& name,
                                          std::int64_t out, std::int64_t in) {
  return mixer.register_module(name, std::make_shared<Weight>(linear_weight(init.within(name), out, in)));
}

// [D, 1, W], uniform in ±1/√W as PyTorch's depthwise Conv1d starts.
std::shared_ptr<Weight> conv_weight(Mixer& mixer, const Initialiser& init, const std::string& name,
                                    std::int64_t channels, std::int64_t taps) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(taps));
  return mixer.register_module(
      name, std::make_shared<Weight>(init.within(name).uniform("weight", {channels, 1, taps}, bound)));
}

// exp(A_log) uniform in (least, 16).
torch::Tensor initial_a_log(const Initialiser& init, std::int64_t heads, double least) {
  const auto unit = 0.5 + 0.5 * init.uniform("A_log", {heads}, 1.0);
  return torch::log(least + (16.0 - least) * unit).clamp_min(-20.0);
}

// softplus(dt_bias) log-uniform in (0.001, 0.1).
torch::Tensor initial_dt_bias(const Initialiser& init, std::int64_t count) {
  const auto unit = 0.5 + 0.5 * init.uniform("dt_bias", {count}, 1.0);
  const auto dt = torch::exp(std::log(1e-3) + unit * (std::log(1e-1) - std::log(1e-3))).clamp_min(1e-4);
  return dt + torch::log(-torch::expm1(-dt));
}

void require(bool holds, const char* field, std::int64_t got, const std::string& expected) {
  if (!holds) throw Error("mixer", field, std::to_string(got), expected);
}

}  // namespace

void validate(const MixerConfig& config) {
  mixer_preset(config.mixer);
  require(config.hidden >= 1 && config.hidden <= kMaxWidth, "hidden", config.hidden,
          "a width from 1 to " + std::to_string(kMaxWidth));
  require(config.heads >= 1 && config.hidden % config.heads == 0, "heads", config.heads,
          "a divisor of hidden, " + std::to_string(config.hidden));
  require(config.conv >= 0 && config.conv <= kMaxTaps, "conv", config.conv,
          "taps from 1 to " + std::to_string(kMaxTaps) + ", or 0 for none");
}

Mixer::Mixer(const MixerConfig& config, const Initialiser& init)
    : config_(config), preset_((validate(config), mixer_preset(config.mixer))) {
  const std::int64_t width = config.hidden;
  rule_.step = parse_step_size(std::string(preset_.step));
  rule_.step.erase_scale = preset_.erase_scale;
  rule_.step.write_scale = preset_.write_scale;
  rule_.qk_l2norm = preset_.qk_l2norm;

  q_proj_ = projection_weight(*this, init, "q_proj", width, width);
  k_proj_ = projection_weight(*this, init, "k_proj", width, width);
  v_proj_ = projection_weight(*this, init, "v_proj", width, width);
  if (preset_.beta != BetaActivation::one) b_proj_ = projection_weight(*this, init, "b_proj", config.heads, width);
  if (preset_.adaptive) {
    // softplus(α) = 1
    alpha_ = register_parameter("alpha", torch::full({config.heads}, std::log(std::expm1(1.0)), torch::kFloat));
  }
  const std::int64_t dim = width / config.heads;
  if (preset_.gate == Gate::scalar) {
    a_proj_ = projection_weight(*this, init, "a_proj", config.heads, width);
  } else if (preset_.gate != Gate::none) {
    auto f_proj = register_module("f_proj", std::make_shared<torch::nn::Module>());
    const auto part = [&](const char* name, std::int64_t out, std::int64_t in) {
      return f_proj->register_module(
          name, std::make_shared<Weight>(linear_weight(init.within("f_proj").within(name), out, in)));
    };
    f_proj_in_ = part("0", dim, width);
    f_proj_out_ = part("1", width, dim);
  }
  if (preset_.gate != Gate::none) {
    a_log_ = register_parameter("A_log", initial_a_log(init, config.heads, preset_.gate == Gate::scalar ? 0.0 : 1.0));
    dt_bias_ =
        register_parameter("dt_bias", initial_dt_bias(init, preset_.gate == Gate::scalar ? config.heads : width));
  }
  if (config.conv > 0) {
    q_conv_ = conv_weight(*this, init, "q_conv1d", width, config.conv);
    k_conv_ = conv_weight(*this, init, "k_conv1d", width, config.conv);
    v_conv_ = conv_weight(*this, init, "v_conv1d", width, config.conv);
  }
  if (config.output_norm) {
    o_norm_ = register_module("o_norm", std::make_shared<Weight>(torch::ones({width / config.heads})));
  }
  o_proj_ = projection_weight(*this, init, "o_proj", width, width);
}

torch::Tensor Mixer::projection() const {
  std::vector<torch::Tensor> parts{q_proj_->value, k_proj_->value, v_proj_->value};
  if (b_proj_) parts.push_back(b_proj_->value);
  if (a_proj_) parts.push_back(a_proj_->value);
  return torch::cat(parts);
}

torch::Tensor Mixer::beta(const torch::Tensor& b) const {
  const auto activated = preset_.beta == BetaActivation::sigmoid ? torch::sigmoid(b) : torch::softplus(b);
  return alpha_.defined() ? activated * torch::softplus(alpha_) : activated;
}

torch::Tensor Mixer::decay(const torch::Tensor& x, const torch::Tensor& a) const {
  if (preset_.gate == Gate::none) return {};
  if (preset_.gate == Gate::scalar) return -torch::exp(a_log_) * torch::softplus(a + dt_bias_);
  const std::int64_t dim = config_.hidden / config_.heads;
  const auto f = torch::matmul(torch::matmul(x, f_proj_in_->value.t()), f_proj_out_->value.t()) + dt_bias_;
  const auto rate = torch::exp(a_log_).unsqueeze(-1);  // [H, 1]
  const auto by_channel = f.unflatten(-1, {config_.heads, dim});
  if (preset_.gate == Gate::safe_channel) return kGateLowerBound * torch::sigmoid(rate * by_channel);
  return -rate * torch::softplus(by_channel);
}

torch::Tensor Mixer::causal_softmax(const torch::Tensor& qkv) const {
  const std::int64_t batch = qkv.size(0), tokens = qkv.size(1), dim = config_.hidden / config_.heads;
  const auto parts = qkv.view({batch, tokens, 3, config_.heads, dim}).permute({2, 0, 3, 1, 4});  // [3, B, H, T, D/H]
  const auto scores = torch::matmul(parts[0], parts[1].transpose(-1, -2)) / std::sqrt(static_cast<double>(dim));
  const auto future = torch::ones({tokens, tokens}, torch::kBool).triu(1);
  const auto weights = torch::softmax(scores.masked_fill(future, -INFINITY), -1);
  return torch::matmul(weights, parts[2]).transpose(1, 2);
}

torch::Tensor Mixer::forward(const torch::Tensor& x) const {
  const std::int64_t batch = x.size(0), tokens = x.size(1), width = config_.hidden, heads = config_.heads;
  const std::int64_t betas = b_proj_ ? heads : 0, rest = betas + (a_proj_ ? heads : 0);
  const auto projected = torch::matmul(x, projection().t());  // [B, T, 3·D + H]
  torch::Tensor qkv, gates;
  if (config_.conv > 0) {
    const auto taps = torch::cat({q_conv_->value, k_conv_->value, v_conv_->value});
    std::tie(qkv, gates) = autograd::short_conv_split(projected, taps, rest);
  } else {
    qkv = torch::silu(projected.narrow(2, 0, 3 * width));
    gates = projected.narrow(2, 3 * width, rest);
  }

  torch::Tensor o;  // [B, T, H, D/H]
  if (preset_.softmax) {
    o = causal_softmax(qkv);
  } else {
    const auto b = b_proj_ ? beta(gates.narrow(2, 0, betas)) : torch::ones({batch, tokens, heads});
    o = autograd::delta_rule_packed(qkv, b, decay(x, gates.narrow(2, betas, rest - betas)), heads, width / heads,
                                    rule_);
  }
  if (o_norm_) o = autograd::rms_norm(o, o_norm_->value);
  return torch::matmul(o.reshape({batch, tokens, width}), o_proj_->value.t());
}

}  // namespace efla::nn
