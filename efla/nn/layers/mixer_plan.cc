#include "efla/nn/layers/mixer_plan.h"

#include <cmath>
#include <utility>

#include "efla/base/check.h"
#include "efla/rule/short_conv.h"

namespace efla::nn {
namespace {

constexpr std::int64_t kMaxMixerWidth = 1 << 16, kMaxStepsPerToken = 16;

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
  return config;
}

DeltaRule rule_of(const MixerConfig& config, const MixerPreset& preset, Gate gate) {
  DeltaRule rule = rule_of(preset);
  rule.decay = gate == Gate::none ? Decay::none : is_by_channel(gate) ? Decay::channel : Decay::scalar;
  rule.qk_l2norm = rule.qk_l2norm && !config.qk_sum_norm;
  return rule;
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
