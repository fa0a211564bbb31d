#include "efla/nn/layers/mixer_plan.h"

#include <cmath>
#include <utility>

#include "efla/base/check.h"
#include "efla/rule/short_conv.h"

namespace efla::nn {
namespace {

constexpr std::int64_t kMaxMixerWidth = 1 << 16, kMaxStepsPerToken = 16;

// Replaces ranks that are 0 by multiples of 32 near factor · √D, for the pairs inside of heads times K/64.
void complete(LowRanks& ranks, std::int64_t width, std::int64_t key_dim) {
  const double root = std::sqrt(static_cast<double>(width)), wide = static_cast<double>(key_dim) / 64.0;
  for (auto [rank, size] : {std::pair{&ranks.decay, 2.5 * root * wide},
                            {&ranks.a, 2.5 * root * wide},
                            {&ranks.value, 1.7 * root * wide},
                            {&ranks.gate, 5.0 * root}}) {
    if (*rank == 0) *rank = std::max<std::int64_t>(32, 32 * std::llrint(size / 32.0));
  }
}

// Replaces sizes that are 0 by their defaults.
MixerConfig completed(MixerConfig config) {
  const Require require("mixer");
  if (config.value_heads == 0) config.value_heads = config.heads;
  if (config.steps_per_token == 0) config.steps_per_token = mixer_preset(config.mixer).steps_per_token;
  for (auto* size : {&config.key_dim, &config.value_dim}) {
    if (*size != 0) continue;
    require(config.heads >= 1 && config.hidden % config.heads == 0, "heads", config.heads,
            "a divisor of hidden, " + std::to_string(config.hidden));
    *size = config.hidden / config.heads;
  }
  if (mixer_preset(config.mixer).rwkv7) complete(config.low_ranks, config.hidden, config.key_dim);
  return config;
}

DeltaRule rule_of(const MixerConfig& config, const MixerPreset& preset, Gate gate) {
  DeltaRule rule = rule_of(preset);
  rule.decay = gate == Gate::none ? Decay::none : is_by_channel(gate) ? Decay::channel : Decay::scalar;
  rule.qk_l2norm = rule.qk_l2norm && !config.qk_sum_norm;
  return rule;
}

}  // namespace

namespace {

void validate_rwkv7(const MixerConfig& config, const Require& require) {
  require(config.value_heads == config.heads, "value_heads", config.value_heads,
          "equal to heads for rwkv7, " + std::to_string(config.heads));
  require(config.heads * config.key_dim == config.hidden, "key_dim", config.key_dim, "hidden / heads for rwkv7");
  require(config.output_norm, "output_norm", false, "true for rwkv7");
  require(config.learned_beta, "learned_beta", false, "true for rwkv7, which has no β");
  require(config.beta_scale == 1.0, "beta_scale", config.beta_scale, "1 for rwkv7, which has no β");
  require(!config.lower_bound, "lower_bound", config.lower_bound.value_or(0.0), "none, as the decay of rwkv7 has one");
  require(config.qk_activation == "silu", "qk_activation", "'" + config.qk_activation + "'",
          "silu, the default, as rwkv7 has no activation there");
  require(config.layers >= 1 && config.layer >= 0 && config.layer < config.layers, "layer", config.layer,
          "an index of the layers, " + std::to_string(config.layers));
  const auto& ranks = config.low_ranks;
  for (const std::int64_t rank : {ranks.decay, ranks.a, ranks.value, ranks.gate}) {
    require.count("low_ranks", rank, kMaxMixerWidth);
  }
}

}  // namespace

void validate(const MixerConfig& given) {
  const Require require("mixer");
  const auto& preset = mixer_preset(given.mixer);
  require.count("hidden", given.hidden, kMaxMixerWidth);
  const MixerConfig config = completed(given);
  require.count("heads", config.heads, kMaxMixerWidth);
  require.count("key_dim", config.key_dim, kMaxMixerWidth);
  require.count("value_dim", config.value_dim, kMaxMixerWidth);
  require(config.value_heads >= 1 && config.value_heads <= kMaxMixerWidth && config.value_heads % config.heads == 0,
          "value_heads", config.value_heads, "a multiple of heads, " + std::to_string(config.heads));
  require(config.conv >= 0 && config.conv <= kMaxConvWidth, "conv", config.conv,
          "taps from 1 to " + std::to_string(kMaxConvWidth) + ", or 0 for none");
  const auto& act = config.qk_activation;
  require(act == "silu" || act == "relu" || act == "elu" || act == "identity", "qk_activation", "'" + act + "'",
          "silu, relu, elu or identity");
  if (config.lower_bound) {
    const double bound = *config.lower_bound;
    require(bound >= -5.0 && bound < 0.0, "lower_bound", bound, "a number in [-5, 0)");
    require(is_by_channel(preset.gate), "lower_bound", bound, "none, as " + config.mixer + " has no decay by channel");
  }
  if (preset.erase_key != EraseKey::key) {
    require(config.value_heads == config.heads, "value_heads", config.value_heads,
            "equal to heads for " + config.mixer + ", " + std::to_string(config.heads));
  }
  require(config.steps_per_token >= 1 && config.steps_per_token <= (preset.steps_per_token > 1 ? kMaxStepsPerToken : 1),
          "steps_per_token", config.steps_per_token,
          preset.steps_per_token > 1 ? "1 to " + std::to_string(kMaxStepsPerToken)
                                     : "1 for " + config.mixer + ", which has one step per token");
  require(!config.qk_sum_norm || preset.steps_per_token == 1, "qk_sum_norm", true, "false for " + config.mixer);
  require(config.learned_beta || preset.erase_key != EraseKey::gated, "learned_beta", false,
          "true for " + config.mixer + ", which has no β beside b");
  if (preset.rwkv7) validate_rwkv7(config, require);
  require(config.norm_eps > 0.0 && std::isfinite(config.norm_eps), "norm_eps", config.norm_eps, "a positive number");
  if (preset.softmax) {
    require(config.value_heads == config.heads && config.heads * config.key_dim == config.hidden &&
                config.value_dim == config.key_dim,
            "key_dim", config.key_dim, "hidden / heads for softmax attention");
  }
}

MixerPlan::MixerPlan(const MixerConfig& given)
    : config(completed(given)),
      preset(mixer_preset(config.mixer)),
      gate(config.lower_bound ? Gate::safe_channel : preset.gate),
      rule(rule_of(config, preset, gate)) {
  add("q_proj", keys());
  add("k_proj", step_keys());
  add("v_proj", step_values());
  if (is_by_channel(gate)) f = add("f_proj.0", config.value_dim);
  if (config.output_gate == OutputGate::sigmoid) g = add("g_proj.0", config.value_dim);
  if (preset.erase_key == EraseKey::gated) {
    b = add("b_proj", keys());
    w = add("w_proj", values());
  } else if (preset.beta != BetaActivation::one && config.learned_beta) {
    b = add("b_proj", betas());
  }
  if (gate == Gate::scalar) a = add("a_proj", config.value_heads);
  if (is_full_rank(config.output_gate)) g = add("g_proj", values());
}

Columns MixerPlan::add(std::string name, std::int64_t count) {
  const Columns columns{projections.empty() ? 0 : projections.back().columns.first + projections.back().columns.count,
                        count};
  projections.push_back({std::move(name), columns});
  return columns;
}

std::string MixerPlan::refusal() const {
  if (preset.softmax) return "layers of softmax attention";
  if (preset.rwkv7) return "the mixer " + config.mixer;
  if (config.conv == 0) return "a mixer without short convolution";
  if (config.qk_activation != "silu") return "the activation " + config.qk_activation;
  return config.qk_sum_norm ? "qk_norm sum" : "";
}

std::span<const Projection> MixerPlan::joint() const {
  return std::span(projections).first(projections.size() - (is_full_rank(config.output_gate) ? 1 : 0));
}

std::int64_t MixerPlan::decays() const {
  if (gate == Gate::none) return 0;
  return is_by_channel(gate) ? config.value_heads * config.key_dim : config.value_heads;
}

}  // namespace efla::nn
