#include "efla/nn/models/config_fields.h"

#include <algorithm>
#include <string>

namespace efla::nn {
namespace {

using io::Fields;
using nlohmann::json;

struct RestrictedField {
  const char* name;
  std::vector<json> supported;  // values
};

// Other fields that flash-linear-attention and Hugging Face's transformers, 4 and 5, write, and that do not change what
// a model computes.
constexpr const char* kIgnoredFields[]{
    "architectures",
    "attn_mode",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "finetuning_task",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_norm",
    "fuse_swiglu",
    "id2label",
    "is_decoder",
    "label2id",
    "max_position_embeddings",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "prefix",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "_attn_implementation_autoset",
    "_name_or_path",
    // Of generation in transformers 4.
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
};

// Other fields of theirs that do, and the values of the models that efla computes.
const std::vector<RestrictedField>& restricted_fields() {
  static const std::vector<RestrictedField> table{
      {"hidden_act", {"swish", "silu"}},
      {"attnres_block_size", {nullptr}},
      {"use_l2warp", {false}},
      {"conv_bias", {false}},
      {"norm_first", {false}},
      {"share_conv_kernel", {false}},
      {"clamp_min", {nullptr}},
      {"clamp_max", {nullptr}},
      {"elementwise_affine", {true, nullptr}},
      {"is_encoder_decoder", {false}},
      {"add_cross_attention", {false}},
      {"cross_attention_hidden_size", {nullptr}},
      {"tie_encoder_decoder", {false}},
      {"pruned_heads", {json::object(), nullptr}},
  };
  return table;
}

}  // namespace

void read_eos_token_id(const Fields& fields, std::vector<std::int64_t>& ids) {
  constexpr const char* kName = "eos_token_id";
  if (const json* value = fields.find(kName)) {
    ids =
        value->is_array() ? fields.get<std::vector<std::int64_t>>(kName) : std::vector{fields.get<std::int64_t>(kName)};
  } else if (fields.content().contains(kName)) {
    ids.clear();
  }
}

void allow_values(const Fields& fields, const char* name, const std::vector<json>& values) {
  const auto* found = fields.find(name);
  if (found == nullptr || std::find(values.begin(), values.end(), *found) != values.end()) return;
  std::string list;
  for (const auto& value : values) list += (list.empty() ? "" : " or ") + value.dump();
  fields.refuse(name, list + ", all that is supported");
}

void read_other_fields(const Fields& fields) {
  for (const char* name : kIgnoredFields) fields.find(name);
  for (const auto& [name, supported] : restricted_fields()) allow_values(fields, name, supported);
}

}  // namespace efla::nn
