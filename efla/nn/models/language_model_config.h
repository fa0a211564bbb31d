// The configuration of a language model. Fields that flash-linear-attention's config.json also has have the same names.
// docs/checkpoints.md lists the fields.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "efla/nn/layers/attention.h"
#include "efla/nn/layers/mixer_plan.h"

namespace efla::nn {

struct LanguageModelConfig {
  std::string mixer = "efla";  // a name of mixer_presets(); softmax: Attention in every layer
  std::int64_t vocab_size = 32000;
  std::int64_t hidden_size = 2048;  // D
  std::int64_t num_hidden_layers = 24;

  std::int64_t num_heads = 16;   // H, of queries and keys
  std::int64_t num_v_heads = 0;  // HV, a multiple of num_heads; 0: equal to num_heads
  std::int64_t head_dim = 0;     // 0: hidden_size / num_heads
  double expand_k = 1.0;         // K = expand_k · head_dim
  double expand_v = 1.0;         // V = expand_v · head_dim
  bool use_short_conv = true;
  std::int64_t conv_size = 4;         // taps
  std::optional<bool> use_gate = {};  // output gate; unset: true for mixers with a decay
  bool use_beta = true;               // false: β has no projection, and 1 in its place
  bool use_output_norm = true;
  bool allow_neg_eigval = false;       // double β; only for the step euler
  std::int64_t num_householder = 0;    // n, steps per token of the mixers deltaproduct; 0: the mixer's
  std::string qk_norm = {};            // "sum" instead of the mixer's "l2"; empty: the mixer's
  std::string qk_activation = "silu";  // as MixerConfig
  bool safe_gate = false;              // safe channel gate with lower_bound, −5 if unset
  std::optional<double> lower_bound = {};

  std::vector<std::int64_t> attention_layers = {};  // of a hybrid: indices of the layers of softmax attention, from 0
  std::int64_t attention_heads = 0;                 // heads of these layers; 0: num_heads
  std::int64_t attention_kv_heads = 0;              // 0: attention_heads
  double rope_theta = 10000.0;

  // Of rwkv7, as LowRanks.
  std::int64_t decay_low_rank_dim = 0, a_low_rank_dim = 0, v_low_rank_dim = 0, gate_low_rank_dim = 0;

  double hidden_ratio = 4.0;           // the MLP has the width 256 ⌈⌊2/3 · hidden_ratio · hidden_size⌋ / 256⌉
  std::int64_t intermediate_size = 0;  // width of the MLP; 0: by hidden_ratio
  double norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;
  std::optional<std::int64_t> bos_token_id = 1, pad_token_id = {};
  std::vector<std::int64_t> eos_token_id{2};  // tokens that end a text

  bool operator==(const LanguageModelConfig&) const = default;

  // Returns whether a layer is one of softmax attention.
  bool is_attention(std::int64_t layer) const;
  // Returns whether any layer is one of softmax attention, so that the state grows with the text.
  bool has_attention() const;
  // Returns the inner width of the MLP.
  std::int64_t mlp_width() const;
  // Returns the number of parameters without small ones: embeddings, projections of q, k, v and the output, and MLPs.
  double least_parameters() const;
  MixerConfig mixer_config() const;  // throws Error if sizes are not integers
  AttentionConfig attention_config() const;
};

// Throws Error that names the field.
void validate(const LanguageModelConfig& config);

}  // namespace efla::nn
