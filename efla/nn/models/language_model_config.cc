#include "efla/nn/models/language_model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "efla/base/check.h"
#include "efla/rule/short_conv.h"

namespace efla::nn {
namespace {

constexpr const char* kConfig = "language model";
constexpr std::int64_t kMaxVocabulary = std::int64_t{1} << 24, kMaxWidth = 1 << 16, kMaxLayers = 1024;

// Returns factor · head_dim, where head_dim 0 stands for hidden_size / num_heads. Throws Error if it is not an integer.
std::int64_t head_size(const LanguageModelConfig& config, const char* field, double factor, const char* what) {
  const Require require(kConfig);
  const auto hidden = static_cast<double>(config.hidden_size), heads = static_cast<double>(config.num_heads);
  const double size = factor * (config.head_dim > 0 ? static_cast<double>(config.head_dim) : hidden / heads);
  const double rounded = std::round(size);
  const bool is_whole = rounded >= 1.0 && rounded <= kMaxWidth && std::abs(size - rounded) <= 1e-5 * rounded;
  require(is_whole || config.head_dim > 0 || std::fmod(hidden, heads) == 0.0, "num_heads", config.num_heads,
          fmt::format("a divisor of hidden_size = {} (heads got a {} of {:.6g})", config.hidden_size, what, size));
  require(is_whole, field, factor, fmt::format("a factor that gives heads a whole {} (got {:.6g})", what, size));
  return std::llround(size);
}

}  // namespace

bool LanguageModelConfig::is_attention(std::int64_t layer) const {
  return mixer_preset(mixer).softmax ||
         std::find(attention_layers.begin(), attention_layers.end(), layer) != attention_layers.end();
}

bool LanguageModelConfig::has_attention() const { return mixer_preset(mixer).softmax || !attention_layers.empty(); }

std::int64_t LanguageModelConfig::mlp_width() const {
  if (intermediate_size > 0) return intermediate_size;
  const auto least = static_cast<std::int64_t>(static_cast<double>(hidden_size) * hidden_ratio * 2.0 / 3.0);
  return (least + 255) / 256 * 256;
}

double LanguageModelConfig::least_parameters() const {
  const auto width = static_cast<double>(hidden_size);
  double projected = 0.0;  // columns, of all layers
  for (std::int64_t i = 0; i < num_hidden_layers; ++i) {
    projected += 3.0 * static_cast<double>(mlp_width());
    if (is_attention(i)) {
      const auto attention = attention_config();
      projected +=
          2.0 * width * (1.0 + static_cast<double>(attention.key_value_heads) / static_cast<double>(attention.heads));
    } else {
      const MixerPlan mixer(mixer_config());
      projected += static_cast<double>(mixer.channels() + mixer.values());
    }
  }
  return width * (static_cast<double>(vocab_size) * (tie_word_embeddings ? 1.0 : 2.0) + projected);
}

MixerConfig LanguageModelConfig::mixer_config() const {
  const auto& preset = mixer_preset(mixer);
  MixerConfig config{.mixer = mixer, .hidden = hidden_size, .heads = num_heads};
  config.conv = use_short_conv ? conv_size : 0;
  config.output_norm = use_output_norm;
  config.value_heads = num_v_heads;
  config.key_dim = head_size(*this, "expand_k", expand_k, "key dim");
  config.value_dim = head_size(*this, "expand_v", expand_v, "value dim");
  if (use_gate.value_or(preset.gate != Gate::none)) {
    config.output_gate = output_gate_of(preset);
  }
  config.steps_per_token = num_householder;
  config.learned_beta = use_beta;
  config.beta_scale = allow_neg_eigval ? 2.0 : 1.0;
  config.qk_activation = qk_activation;
  config.qk_sum_norm = qk_norm == "sum";
  config.lower_bound = lower_bound;
  if (safe_gate || preset.gate == Gate::safe_channel) config.lower_bound = lower_bound.value_or(kGateLowerBound);
  config.norm_eps = norm_eps;
  if (preset.rwkv7) {
    config.conv = 2;  // the token shift
    config.output_gate = OutputGate::none;
    config.low_ranks = {decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim};
  }
  return config;
}

AttentionConfig LanguageModelConfig::attention_config() const {
  AttentionConfig config{.hidden = hidden_size, .heads = attention_heads > 0 ? attention_heads : num_heads};
  config.key_value_heads = attention_kv_heads > 0 ? attention_kv_heads : config.heads;
  config.rope_theta = rope_theta;
  return config;
}

namespace {

// Checks the fields that only some mixers have, by the names of the configuration, and the mixer.
void validate_mixer(const LanguageModelConfig& config, const MixerPreset& preset, const Require& require) {
  require(config.num_householder <= 1 || preset.steps_per_token > 1, "num_householder", config.num_householder,
          "none, as " + config.mixer + " has one step per token");
  for (const auto& [field, rank] : {std::pair{"decay_low_rank_dim", config.decay_low_rank_dim},
                                    {"a_low_rank_dim", config.a_low_rank_dim},
                                    {"v_low_rank_dim", config.v_low_rank_dim},
                                    {"gate_low_rank_dim", config.gate_low_rank_dim}}) {
    require(rank == 0 || preset.rwkv7, field, rank, "none, as " + config.mixer + " has no such projections");
  }
  validate(config.mixer_config());
  if (!preset.rwkv7) return;
  require(!config.is_attention(0), "attn.layers", 0, "others, as layers of rwkv7 read values of the first layer");
  require(config.use_gate.value_or(true), "use_gate", false, "true for rwkv7");
}

}  // namespace

void validate(const LanguageModelConfig& config) {
  const Require require(kConfig);
  const auto& preset = mixer_preset(config.mixer);
  require.count("vocab_size", config.vocab_size, kMaxVocabulary);
  require.count("hidden_size", config.hidden_size, kMaxWidth);
  require.count("num_hidden_layers", config.num_hidden_layers, kMaxLayers);
  require.count("num_heads", config.num_heads, kMaxWidth);
  require(config.head_dim >= 0 && config.head_dim <= kMaxWidth, "head_dim", config.head_dim, "a positive size");
  require(config.num_v_heads >= 0 && config.num_v_heads % config.num_heads == 0, "num_v_heads", config.num_v_heads,
          "a multiple of num_heads, " + std::to_string(config.num_heads));
  if (config.use_short_conv) require.count("conv_size", config.conv_size, kMaxConvWidth);
  require(config.hidden_ratio > 0.0 && config.hidden_ratio <= 64.0, "hidden_ratio", config.hidden_ratio,
          "a number above 0 and at most 64");
  require(config.intermediate_size >= 0, "intermediate_size", config.intermediate_size, "a positive size");
  require.count("intermediate_size", config.mlp_width(), 64 * kMaxWidth);
  require(static_cast<float>(config.norm_eps) > 0.0F && config.norm_eps <= 1.0, "norm_eps", config.norm_eps,
          "a positive number of float32, at most 1");
  require(config.initializer_range > 0.0 && std::isfinite(config.initializer_range), "initializer_range",
          config.initializer_range, "a positive number");
  require(!config.safe_gate || is_by_channel(preset.gate), "safe_gate", true,
          "false, as " + config.mixer + " has no decay by channel");
  require(!config.allow_neg_eigval || preset.step == "euler", "allow_neg_eigval", true,
          "false: " + config.mixer + " has no step of Euler's");
  require(config.qk_norm.empty() || (preset.qk_l2norm && (config.qk_norm == "l2" || config.qk_norm == "sum")),
          "qk_norm", "'" + config.qk_norm + "'",
          preset.qk_l2norm ? "l2 or sum" : "none: " + config.mixer + " takes q and k as they are");
  const auto require_token = [&](const char* field, std::int64_t id) {
    require(id >= 0 && id < config.vocab_size, field, id,
            fmt::format("a token below vocab_size = {}", config.vocab_size));
  };
  if (config.bos_token_id) require_token("bos_token_id", *config.bos_token_id);
  if (config.pad_token_id) require_token("pad_token_id", *config.pad_token_id);
  for (const auto id : config.eos_token_id) require_token("eos_token_id", id);
  require(config.attention_heads >= 0, "attn.num_heads", config.attention_heads, "a positive number");
  require(config.attention_kv_heads >= 0, "attn.num_kv_heads", config.attention_kv_heads, "a positive number");
  bool any_mixer = false, any_attention = false;
  for (const auto layer : config.attention_layers) {
    require(layer >= 0 && layer < config.num_hidden_layers, "attn.layers", layer,
            fmt::format("layers from 0 to {}", config.num_hidden_layers - 1));
    require(std::count(config.attention_layers.begin(), config.attention_layers.end(), layer) == 1, "attn.layers",
            fmt::format("{} twice", layer), "each layer once");
  }
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    (config.is_attention(layer) ? any_attention : any_mixer) = true;
  }
  if (any_mixer) validate_mixer(config, preset, require);
  if (any_attention) {
    const AttentionConfig attention = config.attention_config();
    require(config.hidden_size % (2 * attention.heads) == 0,
            config.attention_heads > 0 ? "attn.num_heads" : "num_heads", attention.heads,
            "a number whose double divides hidden_size, " + std::to_string(config.hidden_size));
    require(attention.heads % attention.key_value_heads == 0, "attn.num_kv_heads", attention.key_value_heads,
            "a divisor of the number of heads, " + std::to_string(attention.heads));
    validate(attention);
  }
}

}  // namespace efla::nn
