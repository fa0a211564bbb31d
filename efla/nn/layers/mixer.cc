#include "efla/nn/layers/mixer.h"

#include <torch/types.h>

#include <cmath>
#include <utility>
#include <vector>

#include "efla/autograd/delta_rule.h"
#include "efla/autograd/layers/decay_gate.h"
#include "efla/autograd/layers/linear.h"
#include "efla/autograd/layers/rms_norm.h"
#include "efla/autograd/layers/short_conv.h"
#include "efla/base/check.h"
#include "efla/base/error.h"

namespace efla::nn {
namespace {

using torch::Tensor;

// GPUs multiply matrices fastest if the length of rows is a multiple of 16 bytes, which are 8 bfloat16 numbers.
constexpr std::int64_t kColumns = 8;

std::shared_ptr<Weight> projection_weight(torch::nn::Module& owner, const Initialiser& init, const std::string& name,
                                          std::int64_t out, std::int64_t in) {
  return owner.register_module(name, std::make_shared<Weight>(linear_weight(init.within(name), out, in)));
}

// Returns the taps [channels, 1, W] of a short convolution.
std::shared_ptr<Weight> conv_weight(Mixer& mixer, const Initialiser& init, const std::string& name,
                                    std::int64_t channels, std::int64_t taps) {
  return mixer.register_module(name, std::make_shared<Weight>(init.within(name).weight({channels, 1, taps}, taps)));
}

// Draws A_log so that exp(A_log) is uniform in (least, 16).
Tensor initial_a_log(const Initialiser& init, std::int64_t heads, double least) {
  const auto unit = 0.5 + 0.5 * init.uniform("A_log", {heads}, 1.0);
  return torch::log(least + (16.0 - least) * unit).clamp_min(-20.0);
}

// Draws dt_bias so that softplus(dt_bias) is log-uniform in (0.001, 0.1).
Tensor initial_dt_bias(const Initialiser& init, std::int64_t count) {
  const auto unit = 0.5 + 0.5 * init.uniform("dt_bias", {count}, 1.0);
  const auto dt = torch::exp(std::log(1e-3) + unit * (std::log(1e-1) - std::log(1e-3))).clamp_min(1e-4);
  return dt + torch::log(-torch::expm1(-dt));
}

Tensor activation(const std::string& name, const Tensor& x) {
  if (name == "silu") return torch::silu(x);
  if (name == "relu") return torch::relu(x);
  if (name == "elu") return torch::elu(x) + 1.0;
  return x;
}

// Computes a depthwise causal convolution without activation. x is [B, T, C], taps [C, 1, W]. With cu_seqlens B is 1.
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

Mixer::Mixer(const MixerConfig& config, const Initialiser& init) : plan_((validate(config), config)) {
  const std::int64_t width = plan_.config.hidden, value_heads = plan_.config.value_heads;
  q_proj_ = projection_weight(*this, init, "q_proj", plan_.keys(), width);
  k_proj_ = projection_weight(*this, init, "k_proj", plan_.keys(), width);
  v_proj_ = projection_weight(*this, init, "v_proj", plan_.values(), width);
  if (plan_.preset.beta != BetaActivation::one && plan_.config.learned_beta) {
    b_proj_ = projection_weight(*this, init, "b_proj", value_heads, width);
  }
  if (plan_.preset.adaptive) {
    // softplus(α) = 1
    alpha_ = register_parameter("alpha", torch::full({value_heads}, std::log(std::expm1(1.0)), torch::kFloat));
  }
  register_decay(init);
  if (plan_.config.conv > 0) {
    q_conv_ = conv_weight(*this, init, "q_conv1d", plan_.keys(), plan_.config.conv);
    k_conv_ = conv_weight(*this, init, "k_conv1d", plan_.keys(), plan_.config.conv);
    v_conv_ = conv_weight(*this, init, "v_conv1d", plan_.values(), plan_.config.conv);
  }
  register_output(init);
}

void Mixer::register_decay(const Initialiser& init) {
  const std::int64_t width = plan_.config.hidden, value_heads = plan_.config.value_heads;
  if (plan_.gate == Gate::none) return;
  const bool scalar = plan_.gate == Gate::scalar;
  const std::int64_t channels = scalar ? value_heads : value_heads * plan_.config.key_dim;
  if (scalar) {
    a_proj_ = projection_weight(*this, init, "a_proj", value_heads, width);
  } else {
    auto f_proj = register_module("f_proj", std::make_shared<torch::nn::Module>());
    f_proj_in_ = projection_weight(*f_proj, init.within("f_proj"), "0", plan_.config.value_dim, width);
    f_proj_out_ = projection_weight(*f_proj, init.within("f_proj"), "1", channels, plan_.config.value_dim);
  }
  a_log_ = register_parameter("A_log", plan_.gate == Gate::safe_channel
                                           ? torch::zeros({value_heads})
                                           : initial_a_log(init, value_heads, scalar ? 0.0 : 1.0));
  dt_bias_ = register_parameter("dt_bias", initial_dt_bias(init, channels));
}

void Mixer::register_output(const Initialiser& init) {
  const std::int64_t width = plan_.config.hidden;
  if (plan_.config.output_gate == OutputGate::silu) {
    g_proj_out_ = projection_weight(*this, init, "g_proj", plan_.values(), width);
  } else if (plan_.config.output_gate == OutputGate::sigmoid) {
    auto g_proj = register_module("g_proj", std::make_shared<torch::nn::Module>());
    g_proj_in_ = projection_weight(*g_proj, init.within("g_proj"), "0", plan_.config.value_dim, width);
    g_proj_out_ = projection_weight(*g_proj, init.within("g_proj"), "1", plan_.values(), plan_.config.value_dim);
    g_bias_ = g_proj_out_->register_parameter("bias", torch::zeros({plan_.values()}));
  }
  if (plan_.config.output_norm) {
    o_norm_ = register_module("o_norm", std::make_shared<Weight>(torch::ones({plan_.config.value_dim})));
  }
  o_proj_ = projection_weight(*this, init, "o_proj", width, plan_.values());
}

std::vector<Tensor> Mixer::gate_weights() const {
  std::vector<Tensor> weights;
  for (const auto& weight : {f_proj_in_, g_proj_in_, b_proj_, a_proj_}) {
    if (weight) weights.push_back(weight->value);
  }
  return weights;
}

std::vector<Tensor> Mixer::projections() const {
  std::vector<Tensor> parts{q_proj_->value, k_proj_->value, v_proj_->value};
  for (const auto& weight : gate_weights()) parts.push_back(weight);
  return parts;
}

Mixer::Gates Mixer::gates_of(const Tensor& columns) const {
  std::vector<std::int64_t> widths;
  std::int64_t beyond = columns.size(2);
  for (const auto& weight : gate_weights()) {
    widths.push_back(weight.size(0));
    beyond -= weight.size(0);
  }
  if (widths.empty()) return {};
  widths.push_back(beyond);
  const auto parts = columns.split_with_sizes(widths, 2);  // their gradients are concatenated, not added
  auto part = parts.begin();
  const auto next = [&](const std::shared_ptr<Weight>& weight) { return weight ? *part++ : Tensor(); };
  Gates gates;
  gates.f = next(f_proj_in_);
  gates.g = next(g_proj_in_);
  gates.b = next(b_proj_);
  gates.a = next(a_proj_);
  return gates;
}

Tensor Mixer::projected(const Tensor& x) const {
  auto parts = projections();
  std::int64_t outputs = 0;
  for (const auto& weight : parts) outputs += weight.size(0);
  const std::int64_t beyond = outputs % kColumns;
  if (x.is_cuda() && beyond != 0) {
    parts.push_back(torch::zeros({kColumns - beyond, plan_.config.hidden}, q_proj_->value.options()));
  }
  return autograd::linear(x, torch::cat(parts));
}

Tensor Mixer::taps() const { return torch::cat({q_conv_->value, k_conv_->value, v_conv_->value}); }

std::array<Tensor, 3> Mixer::heads_of(const Tensor& qkv) const {
  return {
      qkv.narrow(2, 0, plan_.keys()).unflatten(2, {plan_.config.heads, plan_.config.key_dim}),
      qkv.narrow(2, plan_.keys(), plan_.keys()).unflatten(2, {plan_.config.heads, plan_.config.key_dim}),
      qkv.narrow(2, 2 * plan_.keys(), plan_.values()).unflatten(2, {plan_.config.value_heads, plan_.config.value_dim})};
}

Tensor Mixer::activated(const Tensor& qkv) const {
  if (plan_.config.qk_activation == "silu") return torch::silu(qkv);
  const auto qk = activation(plan_.config.qk_activation, qkv.narrow(2, 0, 2 * plan_.keys()));
  return torch::cat({qk, torch::silu(qkv.narrow(2, 2 * plan_.keys(), plan_.values()))}, 2);
}

Tensor Mixer::sum_normed(const Tensor& qkv) const {
  const auto qk = qkv.narrow(2, 0, 2 * plan_.keys()).unflatten(2, {2 * plan_.config.heads, plan_.config.key_dim});
  return torch::cat(
      {(qk / qk.abs().sum(-1, true).clamp_min(1e-6)).flatten(2), qkv.narrow(2, 2 * plan_.keys(), plan_.values())}, 2);
}

std::pair<Tensor, Tensor> Mixer::convolved(const Tensor& projected, const Tensor& cu_seqlens) const {
  std::pair<Tensor, Tensor> result;
  if (plan_.config.conv > 0 && plan_.config.qk_activation == "silu") {
    result = autograd::short_conv_split(projected, taps(), cu_seqlens);
  } else {
    const auto qkv = projected.narrow(2, 0, plan_.channels());
    result = {activated(plan_.config.conv > 0 ? plain_conv(qkv, taps(), cu_seqlens) : qkv),
              projected.slice(2, plan_.channels())};
  }
  if (plan_.config.qk_sum_norm) result.first = sum_normed(result.first);
  return result;
}

Tensor Mixer::beta(const Gates& gates, const Tensor& qkv) const {
  Tensor activated;
  if (b_proj_) {
    activated = plan_.preset.beta == BetaActivation::sigmoid ? torch::sigmoid(gates.b) : torch::softplus(gates.b);
  } else {
    activated = torch::ones({qkv.size(0), qkv.size(1), plan_.config.value_heads}, qkv.options());
  }
  if (alpha_.defined()) activated = activated * torch::softplus(alpha_);
  if (plan_.config.beta_scale != 1.0) activated = activated * plan_.config.beta_scale;
  return activated.to(qkv.scalar_type());  // because softplus widens under autocast
}

Tensor Mixer::decay(const Gates& gates) const {
  if (plan_.gate == Gate::none) return {};
  if (plan_.gate == Gate::scalar) return autograd::decay_gate(gates.a, dt_bias_, a_log_, DecayActivation::softplus);
  const auto f = autograd::linear(gates.f, f_proj_out_->value);
  const double bound = plan_.config.lower_bound.value_or(kGateLowerBound);
  return autograd::decay_gate(f, dt_bias_, a_log_, decay_activation_of(plan_.gate), bound)
      .unflatten(-1, {plan_.config.value_heads, plan_.config.key_dim});
}

Tensor Mixer::causal_softmax(const Tensor& qkv) const {
  const std::int64_t batch = qkv.size(0), tokens = qkv.size(1), dim = plan_.config.key_dim;
  const auto parts =
      qkv.view({batch, tokens, 3, plan_.config.heads, dim}).permute({2, 0, 3, 1, 4});  // [3, B, H, T, D/H]
  const auto scores = torch::matmul(parts[0], parts[1].transpose(-1, -2)) / std::sqrt(static_cast<double>(dim));
  const auto future = torch::ones({tokens, tokens}, scores.options().dtype(torch::kBool)).triu(1);
  const auto weights = torch::softmax(scores.masked_fill(future, -INFINITY), -1);
  return torch::matmul(weights, parts[2]).transpose(1, 2);
}

Tensor Mixer::output_gate(const Tensor& x, const Gates& gates) const {
  const bool silu = plan_.config.output_gate == OutputGate::silu;
  const auto gate = autograd::linear(silu ? x : gates.g, g_proj_out_->value, g_bias_);
  return gate.unflatten(2, {plan_.config.value_heads, plan_.config.value_dim});
}

Tensor Mixer::output(const Tensor& x, const Gates& gates, Tensor o) const {
  o = o.reshape(
      {x.size(0), x.size(1), plan_.config.value_heads, plan_.config.value_dim});  // o of one token has no axis T
  const bool silu = plan_.config.output_gate == OutputGate::silu;
  if (plan_.config.output_gate == OutputGate::none) {
    if (o_norm_) o = autograd::rms_norm(o, o_norm_->value, plan_.config.norm_eps);
  } else if (o_norm_) {
    const auto activation = silu ? GateActivation::silu : GateActivation::sigmoid;
    o = autograd::gated_rms_norm(o, output_gate(x, gates), o_norm_->value, activation, plan_.config.norm_eps);
  } else {
    o = o * (silu ? torch::silu(output_gate(x, gates)) : torch::sigmoid(output_gate(x, gates)));
  }
  return autograd::linear(o.flatten(2), o_proj_->value);
}

Tensor Mixer::forward(const Tensor& x, const Tensor& cu_seqlens) const {
  const auto [qkv, columns] = convolved(projected(x), cu_seqlens);
  const Gates gates = gates_of(columns);
  if (plan_.preset.softmax) {
    Require("mixer")(!cu_seqlens.defined() || cu_seqlens.size(0) == 2, "cu_seqlens", "packed sequences, and softmax",
                     "one sequence");
    return output(x, gates, causal_softmax(qkv));
  }
  if (recurrence_.sequence) {
    Require("mixer")(!cu_seqlens.defined() || cu_seqlens.size(0) == 2, "cu_seqlens",
                     "packed sequences, and a recurrence that was set", "one sequence");
    const auto [q, k, v] = heads_of(qkv);
    return output(x, gates, recurrence_.sequence(q, k, v, beta(gates, qkv)));
  }
  return output(x, gates,
                autograd::delta_rule_packed(qkv, beta(gates, qkv), decay(gates), plan_.config.heads,
                                            plan_.config.key_dim, plan_.rule, cu_seqlens));
}

void Mixer::set_recurrence(Recurrence recurrence) {
  Require("mixer")(plan_.gate == Gate::none, "recurrence", "one for " + plan_.config.mixer, "a mixer without decay");
  recurrence_ = std::move(recurrence);
}

MixerState Mixer::initial_state(std::int64_t batch) const {
  MixerState state;
  const auto options = q_proj_->value.options();
  state.memory = torch::zeros({batch, plan_.config.value_heads, plan_.config.key_dim, plan_.config.value_dim}, options);
  if (plan_.config.conv > 0) state.conv = torch::zeros({batch, plan_.config.conv - 1, plan_.channels()}, options);
  return state;
}

Tensor Mixer::forward(const Tensor& x, MixerState& state) const {
  if (plan_.preset.softmax) throw Error("mixer", "state", "one of " + plan_.config.mixer, "one of a delta rule");
  const torch::NoGradGuard no_grad;
  const std::int64_t tokens = x.size(1);
  Tensor columns;
  if (x.is_cuda() && tokens > 1) {
    columns = projected(x);
  } else {  // for one token, concatenating the results moves less data than concatenating the weights
    std::vector<Tensor> parts;
    for (const auto& weight : projections()) parts.push_back(autograd::linear(x, weight));
    columns = torch::cat(parts, 2);
  }
  const auto inputs = columns.narrow(2, 0, plan_.channels());
  const Gates gates = gates_of(columns.slice(2, plan_.channels()));

  Tensor qkv;
  if (plan_.config.conv > 0) {
    // [B, W − 1 + T, 2·H·K + HV·V]
    const auto window = torch::cat({state.conv.to(inputs.scalar_type()), inputs}, 1);
    qkv = convolved(window, {}).first.narrow(1, plan_.config.conv - 1, tokens);
    const auto last = window.narrow(1, tokens, plan_.config.conv - 1);
    if (tokens == 1) {
      state.conv.copy_(last);
    } else {
      state.conv = last.to(state.conv.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  } else {
    qkv = convolved(inputs, {}).first;
  }
  const auto [q, k, v] = heads_of(qkv);
  const auto b = beta(gates, qkv), g = decay(gates);
  if (tokens == 1) {
    const auto only = [](const Tensor& t) { return t.defined() ? t.select(1, 0) : t; };
    if (recurrence_.step) return output(x, gates, recurrence_.step(only(q), only(k), only(v), only(b), state.memory));
    return output(x, gates,
                  autograd::delta_rule_step(only(q), only(k), only(v), only(b), only(g), state.memory, plan_.rule));
  }
  auto out = autograd::delta_rule({q, k, v, b, state.memory, g, {}}, plan_.rule);
  state.memory = out.final_state;
  return output(x, gates, out.o);
}

Tensor Mixer::forward(const Tensor& x, const PackedWindows& windows, MixerState& states) const {
  if (plan_.preset.softmax) throw Error("mixer", "state", "one of " + plan_.config.mixer, "one of a delta rule");
  const torch::NoGradGuard no_grad;
  const auto columns = projected(x);
  const auto inputs = columns.narrow(2, 0, plan_.channels());
  const Gates gates = gates_of(columns.slice(2, plan_.channels()));
  Tensor qkv;
  if (plan_.config.conv > 0) {
    const auto history = states.conv.flatten(0, 1).to(inputs.scalar_type());
    const auto window = torch::cat({history, inputs[0]}).index_select(0, windows.sources);
    qkv = convolved(window.unsqueeze(0), windows.ends).first.index_select(1, windows.outputs);
    states.conv = window.index_select(0, windows.last).view(states.conv.sizes()).to(torch::kFloat);
  } else {
    qkv = convolved(inputs, {}).first;
  }
  const auto [q, k, v] = heads_of(qkv);
  auto out =
      autograd::delta_rule({q, k, v, beta(gates, qkv), states.memory, decay(gates), windows.cu_seqlens}, plan_.rule);
  states.memory = out.final_state;
  return output(x, gates, out.o);
}

}  // namespace efla::nn
