// The mixers of the delta rule: their equations in tensor operations, presets, projections and bad configurations.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "efla/base/error.h"
#include "efla/nn/layers/block.h"
#include "efla/torch/autocast.h"
#include "efla/torch/context.h"
#include "tests/nn/parameters_of.h"
#include "tests/support/expect_error.h"
#include "tests/support/torch_tensors.h"

namespace efla::nn {
namespace {

using test::max_difference;
using test::random_tensor;
using torch::Tensor;

// β of a preset, and its gains on write and erase as functions of β and λ = ‖k‖², written from the table of
// docs/equations.md and not from the code's.
struct Expected {
  std::function<Tensor(const Tensor& b, const std::map<std::string, Tensor>&)> beta;
  std::function<Tensor(const Tensor&beta, const Tensor&lambda)> erase, write;
  bool l2norm = false;
  // The logarithm of the decay [B, T, H] or [B, T, H, D/H]; empty without one.
  std::function<Tensor(const Tensor& x, const std::map<std::string, Tensor>&)> decay = {};
  // Returns the erase key from the activated q, k and v, and replaces q or v; {}: one key. decay: e^g.
  std::function<Tensor(Tensor& q, const Tensor& k, Tensor& v, const Tensor& x, const std::map<std::string, Tensor>&,
                       const Tensor& decay)>
      erase_key = {};
  std::int64_t steps = 1;  // n, per token
};

std::map<std::string, Expected> expected_mixers() {
  const auto sigmoid = [](const Tensor& b, const auto&) { return torch::sigmoid(b); };
  const auto euler = [](const Tensor& beta, const Tensor&) { return beta; };
  const auto exact = [](const Tensor& beta, const Tensor& l) { return -torch::expm1(-beta * l) / l; };
  const auto rk2 = [](const Tensor& beta, const Tensor& l) { return beta * (1 - beta * l / 2); };
  const auto rk4 = [](const Tensor& beta, const Tensor& l) {
    const auto x = beta * l;
    return beta * (1 - x / 2 + x * x / 6 - x * x * x / 24);
  };
  const auto implicit = [](const Tensor& beta, const Tensor& l) { return beta / (1 + beta * l); };
  const auto trapezoid = [](const Tensor& beta, const Tensor& l) { return beta / (1 + beta * l / 2); };
  const auto none = [](const Tensor& beta, const Tensor&) { return torch::zeros_like(beta); };
  const auto twice = [](const Tensor& beta, const Tensor&) { return 2 * beta; };
  const auto scalar = [](const Tensor& x, const auto& p) {
    const auto a = x.matmul(p.at("a_proj.weight").t()) + p.at("dt_bias");
    return -p.at("A_log").exp() * (1 + a.exp()).log();
  };
  const auto f = [](const Tensor& x, const auto& p) {
    const auto y = x.matmul(p.at("f_proj.0.weight").t()).matmul(p.at("f_proj.1.weight").t()) + p.at("dt_bias");
    return y.unflatten(2, {p.at("A_log").size(0), -1});
  };
  const auto channel = [f](const Tensor& x, const auto& p) {
    return -p.at("A_log").exp().unsqueeze(-1) * (1 + f(x, p).exp()).log();
  };
  const auto safe = [f](const Tensor& x, const auto& p) {
    return -5 * torch::sigmoid(p.at("A_log").exp().unsqueeze(-1) * f(x, p));
  };
  const auto one = [](const Tensor& b, const auto&) { return torch::ones({b.size(0), b.size(1), 2}); };
  const auto gated = [](Tensor&, const Tensor& k, Tensor& v, const Tensor& x, const auto& p, const Tensor&) {
    v = v * torch::sigmoid(x.matmul(p.at("w_proj.weight").t())).view(v.sizes());
    return k * torch::sigmoid(x.matmul(p.at("b_proj.weight").t())).view(k.sizes());
  };
  const auto closed_loop = [](Tensor& q, const Tensor& k, Tensor&, const Tensor&, const auto& p, const Tensor& decay) {
    q = q - (p.at("D") * torch::sigmoid(p.at("decay"))).unsqueeze(-1) * k;
    return k / decay.unsqueeze(-1);
  };
  return {
      {"deltaproduct", {sigmoid, euler, euler, true, {}, {}, 2}},
      {"deltaproduct-neg", {sigmoid, twice, twice, true, {}, {}, 2}},
      {"deltaproduct-exact", {sigmoid, exact, exact, true, {}, {}, 2}},
      {"gated-deltaproduct", {sigmoid, euler, euler, true, scalar, {}, 2}},
      {"gated-deltaproduct-exact", {sigmoid, exact, exact, true, scalar, {}, 2}},
      {"gdn2", {one, euler, euler, true, channel, gated}},
      {"gdn2-exact", {one, exact, exact, true, channel, gated}},
      {"comba", {sigmoid, euler, euler, true, scalar, closed_loop}},
      {"comba-exact", {sigmoid, exact, exact, true, scalar, closed_loop}},
      {"gdn", {sigmoid, euler, euler, true, scalar}},
      {"efla-gdn", {sigmoid, exact, exact, false, scalar}},
      {"kda", {sigmoid, euler, euler, true, channel}},
      {"kda-exact", {sigmoid, exact, exact, true, channel}},
      {"kda-exact-nol2", {sigmoid, exact, exact, false, channel}},
      {"efla-kda", {sigmoid, exact, exact, false, safe}},
      {"deltanet-neg-fla", {sigmoid, twice, twice, true}},
      {"deltanet", {sigmoid, euler, euler, true}},
      {"deltanet-neg", {sigmoid, twice, euler, true}},
      {"efla", {sigmoid, exact, exact}},
      {"efla-adaptive",
       {[](const Tensor& b, const auto& p) { return torch::sigmoid(b) * torch::softplus(p.at("alpha")); }, exact,
        exact}},
      {"efla-loose", {[](const Tensor& b, const auto&) { return torch::softplus(b); }, exact, exact}},
      {"rk2", {sigmoid, rk2, rk2}},
      {"rk4", {sigmoid, rk4, rk4}},
      {"longhorn", {sigmoid, implicit, implicit}},
      {"trapezoid", {sigmoid, trapezoid, trapezoid}},
      {"linear", {[](const Tensor& b, const auto&) { return torch::ones_like(b); }, none, euler}},
  };
}

// One layer's mixer by the recurrence, token by token, in tensor operations.
Tensor eager_mixer(const Expected& mixer, const MixerConfig& config, const std::map<std::string, Tensor>& p,
                   const Tensor& x) {
  const std::int64_t batch = x.size(0), tokens = x.size(1), heads = config.heads;
  const std::int64_t value_heads = config.value_heads > 0 ? config.value_heads : heads;
  const std::int64_t key_dim = config.key_dim > 0 ? config.key_dim : config.hidden / heads;
  const std::int64_t value_dim = config.value_dim > 0 ? config.value_dim : config.hidden / heads;
  const auto branch = [&](const std::string& name, const std::string& activation) {
    auto y = x.matmul(p.at(name + "_proj.weight").t()).transpose(1, 2);  // [B, D, T]
    if (config.conv > 0) {
      y = torch::conv1d(torch::constant_pad_nd(y, {config.conv - 1, 0}), p.at(name + "_conv1d.weight"), {}, 1,
                        at::IntArrayRef{0}, 1, y.size(1));
    }
    if (activation == "silu") y = torch::silu(y);
    if (activation == "relu") y = torch::relu(y);
    if (activation == "elu") y = torch::where(y > 0, y + 1, y.exp());
    return y.transpose(1, 2);
  };
  const auto unit = [](const Tensor& y) { return y * torch::rsqrt(y.square().sum(-1, true) + 1e-6); };
  auto q = branch("q", config.qk_activation).reshape({batch, tokens, heads, key_dim});
  const std::int64_t n = config.steps_per_token > 0 ? config.steps_per_token : mixer.steps, steps = tokens * n;
  auto k = branch("k", config.qk_activation).reshape({batch, steps, heads, key_dim});
  auto v = branch("v", "silu").reshape({batch, steps, value_heads, value_dim});
  const auto ones = torch::ones({batch, steps, value_heads});
  auto decay = mixer.decay ? mixer.decay(x, p).exp() : ones;
  Tensor erase_key;
  if (mixer.erase_key) {
    erase_key = mixer.erase_key(q, k, v, x, p, decay) * torch::rsqrt(k.square().sum(-1, true) + 1e-6);
  }
  if (config.qk_sum_norm) {
    q = q / q.abs().sum(-1, true).clamp_min(1e-6), k = k / k.abs().sum(-1, true).clamp_min(1e-6);
  } else if (mixer.l2norm) {
    q = unit(q), k = unit(k);
  }
  q = q.repeat_interleave(value_heads / heads, 2), k = k.repeat_interleave(value_heads / heads, 2);
  if (!erase_key.defined()) erase_key = k;
  const bool learned = p.count("b_proj.weight") > 0;
  const auto b = learned ? x.matmul(p.at("b_proj.weight").t()).reshape({batch, steps, -1}) : ones;
  auto beta = mixer.beta(b, p) * config.beta_scale;
  if (!config.learned_beta) beta = ones * config.beta_scale;
  const auto lambda = (erase_key * k).sum(-1), erase = mixer.erase(beta, lambda), write = mixer.write(beta, lambda);
  auto state = torch::zeros({batch, value_heads, key_dim, value_dim});
  if (decay.dim() == 3) decay = decay.unsqueeze(-1);
  std::vector<Tensor> outputs;
  for (std::int64_t t = 0; t < steps; ++t) {
    const auto at = [&](const Tensor& y) { return y.select(1, t).unsqueeze(-1); };
    if (t % n == 0) state = decay.select(1, t / n).unsqueeze(-1) * state;
    const auto read = state.transpose(-1, -2).matmul(at(erase_key));
    const auto error = at(write).unsqueeze(-1) * at(v) - at(erase).unsqueeze(-1) * read;  // [B, HV, V, 1]
    state = state + at(k).matmul(error.transpose(-1, -2));
    if (t % n != n - 1) continue;
    const auto query = q.select(1, t / n).unsqueeze(-1);
    outputs.push_back(state.transpose(-1, -2).matmul(query).squeeze(-1) / std::sqrt(static_cast<double>(key_dim)));
  }
  auto o = torch::stack(outputs, 1);
  if (config.output_norm) o = o * torch::rsqrt(o.square().mean(-1, true) + config.norm_eps) * p.at("o_norm.weight");
  o = o.flatten(2);
  if (config.output_gate == OutputGate::silu) o = o * torch::silu(x.matmul(p.at("g_proj.weight").t()));
  if (config.output_gate == OutputGate::full_sigmoid) o = o * torch::sigmoid(x.matmul(p.at("g_proj.weight").t()));
  if (config.output_gate == OutputGate::sigmoid) {
    const auto low = x.matmul(p.at("g_proj.0.weight").t());
    o = o * torch::sigmoid(low.matmul(p.at("g_proj.1.weight").t()) + p.at("g_proj.1.bias"));
  }
  return o.matmul(p.at("o_proj.weight").t());
}

void expect_same_gradients(const torch::nn::Module& mixer, const Tensor& x, const Tensor& y, const Tensor& expected) {
  std::vector<Tensor> inputs{x};
  std::vector<std::string> names{"x"};
  for (const auto& item : mixer.named_parameters()) {
    inputs.push_back(item.value());
    names.push_back(item.key());
  }
  const auto weight = random_tensor(y.sizes(), 9).to(torch::kFloat);
  const auto gradients = torch::autograd::grad({(y * weight).sum()}, inputs, {}, true, false, true);
  const auto wanted = torch::autograd::grad({(expected * weight).sum()}, inputs, {}, true, false, true);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_TRUE(gradients[i].defined() && wanted[i].defined()) << names[i];
    const double size = wanted[i].abs().max().item<double>();
    EXPECT_LE(max_difference(gradients[i], wanted[i]), 1e-4 * std::max(1.0, size)) << names[i];
  }
}

TEST(Mixer, EveryPresetIsItsEquation) {
  auto all = expected_mixers();
  for (const auto& preset : mixer_presets()) {
    if (preset.softmax || preset.rwkv7) continue;
    SCOPED_TRACE(std::string(preset.name));
    ASSERT_TRUE(all.count(std::string(preset.name)));
    const MixerConfig config{.mixer = std::string(preset.name), .hidden = 32, .heads = 2};
    const Mixer mixer(config, Initialiser(3));
    const auto x = random_tensor({2, 45, 32}, 1).to(torch::kFloat).requires_grad_(true);
    const auto y = mixer.forward(x);
    const auto expected = eager_mixer(all.at(std::string(preset.name)), config, parameters_of(mixer), x);
    EXPECT_LE(max_difference(y, expected), 1e-4);
    expect_same_gradients(mixer, x, y, expected);
  }
}

// A layer of RWKV-7 by its equations, one update of the state per token. first_values: as in Rwkv7Mixer.
Tensor eager_rwkv7(const MixerConfig& config, const std::map<std::string, Tensor>& p, const Tensor& x,
                   Tensor& first_values) {
  const std::int64_t batch = x.size(0), tokens = x.size(1), heads = config.heads, dim = config.hidden / heads;
  const auto before = torch::cat({torch::zeros({batch, 1, config.hidden}), x.narrow(1, 0, tokens - 1)}, 1);
  const auto mixed = [&](const char* name) { return x + (before - x) * p.at(std::string("x_") + name); };
  const auto by = [&](const Tensor& y, const char* name) { return y.matmul(p.at(std::string(name) + ".weight").t()); };
  const auto r = by(mixed("r"), "r_proj").view({batch, tokens, heads, dim});
  const auto w = by(torch::tanh(by(mixed("w"), "w_lora.lora.0")), "w_lora.lora.2") + p.at("w_lora.lora.2.bias");
  const auto decay = torch::exp(-std::exp(-0.5) * torch::sigmoid(w)).view({batch, tokens, heads, dim});
  const auto k = by(mixed("k"), "k_proj");
  auto v = by(mixed("v"), "v_proj");
  if (config.layer == 0) {
    first_values = v;
  } else {
    const auto share = by(by(mixed("v"), "v_lora.lora.0"), "v_lora.lora.2") + p.at("v_lora.lora.2.bias");
    v = v + (first_values - v) * torch::sigmoid(share);
  }
  const auto a = torch::sigmoid(by(by(mixed("a"), "a_lora.lora.0"), "a_lora.lora.2") + p.at("a_lora.lora.2.bias"));
  const auto gate = by(torch::sigmoid(by(mixed("g"), "g_lora.lora.0")), "g_lora.lora.2");
  auto removal = (k * p.at("k_k")).view({batch, tokens, heads, dim});
  removal = removal / removal.square().sum(-1, true).sqrt();
  const auto key = (k * (1 + (a - 1) * p.at("k_a"))).view({batch, tokens, heads, dim});
  const auto values = v.view({batch, tokens, heads, -1});
  auto state = torch::zeros({batch, heads, dim, values.size(3)});
  std::vector<Tensor> outputs;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto at = [&](const Tensor& y) { return y.select(1, t).unsqueeze(-1); };
    const auto read = state.transpose(-1, -2).matmul(at(removal));  // of the state before its decay
    const auto erased = at(removal * a.view(removal.sizes())).matmul(read.transpose(-1, -2));
    state = at(decay) * state - erased + at(key).matmul(at(values).transpose(-1, -2));
    outputs.push_back(state.transpose(-1, -2).matmul(at(r)).squeeze(-1));
  }
  auto o = torch::stack(outputs, 1);
  o = (o - o.mean(-1, true)) * torch::rsqrt(o.var(-1, false, true) + static_cast<double>(dim) * config.norm_eps);
  o = o.flatten(2) * p.at("g_norm.weight") + p.at("g_norm.bias");
  const auto bonus = ((r * key * p.at("r_k")).sum(-1, true) * values).flatten(2);
  return by((o + bonus) * gate, "o_proj");
}

TEST(Rwkv7Mixer, IsItsEquations) {
  for (const std::int64_t layer : {0, 2}) {
    MixerConfig config{.mixer = "rwkv7", .hidden = 32, .heads = 2, .value_dim = 24};
    config.layer = layer;
    config.layers = 3;
    config.norm_eps = 0.1;
    const Rwkv7Mixer mixer(config, Initialiser(3));
    const auto x = random_tensor({2, 45, 32}, 1).to(torch::kFloat).requires_grad_(true);
    Tensor first = random_tensor({2, 45, 48}, 2).to(torch::kFloat).requires_grad_(true), eager_first = first;
    const Tensor given = first;
    const auto y = mixer.forward(x, {}, first);
    const auto expected = eager_rwkv7(config, parameters_of(mixer), x, eager_first);
    EXPECT_LE(max_difference(y, expected), 1e-4);
    EXPECT_LE(max_difference(first, eager_first), 1e-5);
    expect_same_gradients(mixer, x, y, expected);
    if (layer == 0) continue;
    const auto of_values = [&](const Tensor& z) { return torch::autograd::grad({z.square().sum()}, {given})[0]; };
    const auto wanted = of_values(expected);
    EXPECT_LE(max_difference(of_values(y), wanted), 1e-4 * wanted.abs().max().item<double>());
  }
}

TEST(Rwkv7Mixer, RefusesWhatItDoesNotHave) {
  const auto refuses = [](auto&& change, const char* field) {
    MixerConfig config{.mixer = "rwkv7", .hidden = 32, .heads = 2};
    change(config);
    test::expect_error([&] { validate(config); }, field, "rwkv7");
  };
  refuses([](MixerConfig& c) { c.value_heads = 4; }, "value_heads");
  refuses([](MixerConfig& c) { c.key_dim = 8; }, "key_dim");
  refuses([](MixerConfig& c) { c.beta_scale = 2.0; }, "beta_scale");
  refuses([](MixerConfig& c) { c.lower_bound = -1.0; }, "lower_bound");
  test::expect_error([] { Mixer({.mixer = "rwkv7", .hidden = 32, .heads = 2}, Initialiser(1)); }, "mixer",
                     "a delta rule");
  MixerConfig later{.mixer = "rwkv7", .hidden = 32, .heads = 2};
  later.layer = 1;
  later.layers = 2;
  const Rwkv7Mixer mixer(later, Initialiser(1));
  Tensor none;
  test::expect_error([&] { mixer.forward(torch::zeros({1, 3, 32}), {}, none); }, "first_values", "first layer");
}

TEST(Mixer, PartsCanBeLeftOut) {
  for (const MixerConfig& config : {MixerConfig{.hidden = 16, .conv = 0}, MixerConfig{.hidden = 16, .conv = 7},
                                    MixerConfig{.hidden = 16, .output_norm = false}}) {
    const Mixer mixer(config, Initialiser(3));
    const auto x = random_tensor({2, 33, 16}, 1).to(torch::kFloat).requires_grad_(true);
    const auto y = mixer.forward(x);
    const auto expected = eager_mixer(expected_mixers().at("efla"), config, parameters_of(mixer), x);
    EXPECT_LE(max_difference(y, expected), 1e-4);
    expect_same_gradients(mixer, x, y, expected);
  }
}

// What language models add to the rule: grouped values, gates of the output, other activations, norms and bounds.
TEST(Mixer, OptionsAreTheirEquations) {
  MixerConfig grouped{.mixer = "gdn", .hidden = 32, .heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 24};
  grouped.output_gate = OutputGate::silu;
  grouped.beta_scale = 2.0;
  grouped.norm_eps = 0.1;
  MixerConfig channel{.mixer = "kda", .hidden = 32, .heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 4};
  channel.output_gate = OutputGate::sigmoid;
  channel.lower_bound = -2.0;
  MixerConfig sums{.mixer = "deltanet", .hidden = 32, .heads = 2};
  sums.qk_activation = "elu";
  sums.qk_sum_norm = true;
  sums.learned_beta = false;
  MixerConfig signs = sums;  // with queries and keys of both signs
  signs.qk_activation = "identity";
  MixerConfig relu{.mixer = "efla", .hidden = 32, .heads = 2, .conv = 0};
  relu.qk_activation = "relu";
  const Mixer unbounded({.mixer = "efla-kda", .hidden = 32, .heads = 2},
                        Initialiser(3));  // its gate has a bound all the same
  EXPECT_EQ(parameters_of(unbounded).at("A_log").abs().max().item<double>(), 0.0);
  MixerConfig comba{.mixer = "comba", .hidden = 32, .heads = 2, .key_dim = 8, .value_dim = 24};
  comba.output_gate = OutputGate::full_sigmoid;
  MixerConfig product{.mixer = "gated-deltaproduct", .hidden = 32, .heads = 2, .value_heads = 4, .key_dim = 8};
  product.value_dim = 24;
  product.steps_per_token = 3;
  product.beta_scale = 2.0;
  product.output_gate = OutputGate::silu;
  MixerConfig single{.mixer = "deltaproduct", .hidden = 32, .heads = 2, .conv = 0};
  single.steps_per_token = 1;
  single.qk_activation = "elu";
  for (const auto& config : {grouped, channel, sums, signs, relu, comba, product, single}) {
    SCOPED_TRACE(config.mixer);
    const Mixer mixer(config, Initialiser(3));
    auto expected_mixer = expected_mixers().at(config.mixer);
    if (config.lower_bound) {
      EXPECT_EQ(parameters_of(mixer).at("A_log").abs().max().item<double>(), 0.0);
      expected_mixer.decay = [](const Tensor& x, const auto& p) {
        const auto f = x.matmul(p.at("f_proj.0.weight").t()).matmul(p.at("f_proj.1.weight").t()) + p.at("dt_bias");
        return -2 * torch::sigmoid(p.at("A_log").exp().unsqueeze(-1) * f.unflatten(2, {4, 8}));
      };
    }
    const auto x = random_tensor({2, 45, 32}, 1).to(torch::kFloat).requires_grad_(true);
    const auto y = mixer.forward(x);
    const auto expected = eager_mixer(expected_mixer, config, parameters_of(mixer), x);
    EXPECT_LE(max_difference(y, expected), 1e-4);
    expect_same_gradients(mixer, x, y, expected);
  }
}

TEST(MixerPlan, HasTheProjectionsOfTheModuleSideBySide) {
  for (const auto& preset : mixer_presets()) {
    if (preset.rwkv7) continue;  // it has other projections
    for (const auto gate : {OutputGate::none, OutputGate::silu, OutputGate::sigmoid, OutputGate::full_sigmoid}) {
      SCOPED_TRACE(std::string(preset.name) + " gate " + std::to_string(static_cast<int>(gate)));
      const MixerConfig config{.mixer = std::string(preset.name),
                               .hidden = 24,
                               .heads = 2,
                               .value_heads = preset.softmax || preset.erase_key != EraseKey::key ? 2 : 4,
                               .output_gate = gate};
      const MixerPlan plan(config);
      auto p = parameters_of(*std::visit([](const auto& mixer) -> std::shared_ptr<torch::nn::Module> { return mixer; },
                                         Block({.mixer = config}, Initialiser(1)).mixer));
      std::int64_t columns = 0;
      for (const auto& projection : plan.projections) {
        EXPECT_EQ(projection.columns.first, columns) << projection.name;
        columns += projection.columns.count;
        EXPECT_EQ(p.at(projection.name + ".weight").sizes(), at::IntArrayRef({projection.columns.count, 24}));
        p.erase(projection.name + ".weight");
      }
      for (const auto& [name, tensor] : p) {
        EXPECT_TRUE(tensor.dim() != 2 || name.ends_with("proj.1.weight") || name == "o_proj.weight") << name;
      }
      EXPECT_EQ(plan.joint().size(), plan.projections.size() - (is_full_rank(gate) ? 1 : 0));
      EXPECT_EQ(plan.projections.back().name == "g_proj", is_full_rank(gate));
    }
  }
}

TEST(MixerPlan, NamesWhatInferenceDoesNotSupport) {
  const auto refusal = [](const MixerConfig& config) { return MixerPlan(config).refusal(); };
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({.mixer = "softmax"}), "layers of softmax attention");
  EXPECT_EQ(refusal({.mixer = "rwkv7"}), "the mixer rwkv7");
  EXPECT_EQ(refusal({.conv = 0}), "a mixer without short convolution");
  EXPECT_EQ(refusal({.qk_activation = "relu"}), "the activation relu");
  EXPECT_EQ(refusal({.mixer = "deltanet", .qk_sum_norm = true}), "qk_norm sum");
}

TEST(MixerPlan, RefusesStepsThatAMixerCannotHave) {
  MixerConfig config{.mixer = "gdn", .hidden = 32, .heads = 2};
  config.steps_per_token = 2;
  test::expect_error([&] { validate(config); }, "steps_per_token", "1 for gdn, which has one step per token");
  config.mixer = "gated-deltaproduct";
  config.steps_per_token = 17;
  test::expect_error([&] { validate(config); }, "steps_per_token", "1 to 16");
  config.steps_per_token = 2;
  config.qk_sum_norm = true;
  test::expect_error([&] { validate(config); }, "qk_sum_norm", "false for gated-deltaproduct");
}

// Comba's erase key e^(-g) k would leave the range of float32 where a token decays the state to nothing.
TEST(Mixer, ClosedLoopKeysStayFinite) {
  for (const char* name : {"comba", "comba-exact"}) {
    SCOPED_TRACE(name);
    const Mixer mixer({.mixer = name, .hidden = 32, .heads = 2}, Initialiser(3));
    parameters_of(mixer).at("dt_bias").data().fill_(1000.0);
    const auto x = random_tensor({1, 45, 32}, 1).to(torch::kFloat).requires_grad_(true);
    const auto y = mixer.forward(x);
    EXPECT_TRUE(y.isfinite().all().item<bool>());
    EXPECT_TRUE(torch::autograd::grad({y.sum()}, {x})[0].isfinite().all().item<bool>());
  }
}

TEST(Mixer, SumsOfZerosDivideNothing) {
  MixerConfig config{.mixer = "deltanet", .hidden = 32, .heads = 2};
  config.qk_activation = "relu";
  config.qk_sum_norm = true;
  const auto y = Mixer(config, Initialiser(3)).forward(torch::zeros({1, 5, 32}));
  EXPECT_EQ(y.abs().max().item<double>(), 0.0) << "no NaN of 0 / 0";
}

}  // namespace
}  // namespace efla::nn
