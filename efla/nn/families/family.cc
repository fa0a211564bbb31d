#include "efla/nn/families/family.h"

namespace efla::nn {
namespace {

// Qwen3.5, also Qwen3.6 and Qwen3.8: Gated DeltaNet and gated attention with rope of a part of each head.
Family qwen3_5() {
  Family f;
  f.model_type = "qwen3_5";
  f.text_type = "qwen3_5_text";
  f.prefixes = {"model.language_model.", "model.", "language_model.model.", "language_model.", ""};
  f.skipped = {"model.visual.", "visual.", "vision_tower.", "mm_projector.", "mtp.", "model.mtp."};
  f.draft_heads = {"mtp.", "model.mtp."};
  f.delta_norms = {.before_mixer = {"input_layernorm"}, .before_mlp = {"post_attention_layernorm"}};
  f.attention_norms = f.delta_norms;
  f.projections = {{"in_proj_qkv", 3}, {"in_proj_b"}, {"in_proj_a"}, {"in_proj_z"}};
  f.convolutions = {"conv1d"};
  f.output_norm = "norm";
  f.output = "out_proj";
  f.zero_centred_norms = true;
  f.gated_attention = true;
  f.partial_rotary_factor = 0.25;
  return f;
}

// Qwen3.5 with mixtures of experts, such as 35B-A3B.
Family qwen3_5_moe() {
  Family f = qwen3_5();
  f.model_type = "qwen3_5_moe";
  f.text_type = "qwen3_5_moe_text";
  f.has_experts = true;
  return f;
}

// Qwen3-Next: Qwen3.5's layers with projections that are packed by key head.
Family qwen3_next() {
  Family f = qwen3_5();
  f.model_type = "qwen3_next";
  f.text_type = {};
  f.prefixes = {"model.", ""};
  f.skipped = {"mtp.", "model.mtp."};
  f.projections = {};
  f.packed = {{"in_proj_qkvz", "qkvz"}, {"in_proj_ba", "ba"}};
  f.has_experts = true;
  return f;
}

// OLMo-Hybrid: delta layers with norms before, attention layers with norms after. transformers saves two norms under
// the names of an older version, and divides the taps of all channels evenly among the three convolutions.
Family olmo_hybrid() {
  Family f;
  f.model_type = "olmo_hybrid";
  f.prefixes = {"model.", ""};
  f.skipped = {"mtp."};
  f.delta_norms = {.before_mixer = {"input_layernorm", "attention_layer_norm"},
                   .before_mlp = {"post_attention_layernorm", "feedforward_layer_norm"}};
  f.attention_norms = {.after_mixer = {"post_attention_layernorm", "feedforward_layer_norm"},
                       .after_mlp = {"post_feedforward_layernorm"}};
  f.projections = {{"q_proj"}, {"k_proj"}, {"v_proj"}, {"b_proj"}, {"a_proj"}, {"g_proj"}};
  f.convolutions = {"q_conv1d", "k_conv1d", "v_conv1d"};
  f.output_norm = "o_norm";
  f.output = "o_proj";
  f.output_norm_eps = 1e-5;
  f.norm_per_head = false;
  f.derives_sizes = true;
  f.may_lack_positions = true;
  return f;
}

Family lacking(std::string_view model_type, std::string_view lacks) {
  Family f;
  f.model_type = model_type;
  f.lacks = lacks;
  return f;
}

}  // namespace

std::span<const Family> families() {
  static const std::vector<Family> all{
      qwen3_5(),
      qwen3_5_moe(),
      qwen3_next(),
      olmo_hybrid(),
      lacking("kimi_linear",
              "multi-head latent attention (kv_lora_rank) and experts chosen by sigmoid scores (num_experts)"),
  };
  return all;
}

const Family* find_family(std::string_view model_type) {
  for (const auto& family : families()) {
    if (model_type == family.model_type || (!model_type.empty() && model_type == family.text_type)) return &family;
  }
  return nullptr;
}

}  // namespace efla::nn
