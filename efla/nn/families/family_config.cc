#include "efla/nn/families/family_config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/nn/families/gguf_config.h"
#include "efla/nn/families/quantisation_config.h"
#include "efla/nn/models/config_fields.h"
#include "efla/rule/short_conv.h"

namespace efla::nn {
namespace {

namespace fs = std::filesystem;
using io::Fields;
using nlohmann::json;

constexpr const char* kConfigFile = "config.json";
constexpr const char* kGenerationFile = "generation_config.json";
constexpr std::int64_t kMostLayers = 1 << 12, kMostWidth = 1 << 16, kMostIds = std::int64_t{1} << 31;
constexpr std::int64_t kMostInner = 1 << 20, kMostHeads = 1 << 12, kMostExperts = 1 << 16;
constexpr std::int64_t kUsualInterval = 4;  // layers from one of attention to the next

// Fields of the top level beside text_config, of which a text model needs none.
constexpr const char* kVisionFields[]{"image_token_id", "video_token_id", "vision_start_token_id",
                                      "vision_end_token_id", "vision_config"};

// Fields of the text part that say how a model was initialised or trained, or describe the head for drafts, whose
// tensors do.
constexpr const char* kTrainingFields[]{
    "attention_dropout",     "full_attention_interval",      "initializer_range",    "linear_a_log_max",
    "linear_a_log_min",      "linear_dt_init_floor",         "linear_dt_max",        "linear_dt_min",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "output_router_logits", "pad_token_id",
    "router_aux_loss_coef"};

// Returns a size; where it is absent, `derived` if the family allows that.
std::int64_t size_of(const Fields& fields, const char* name, std::int64_t largest, const Family& family,
                     std::int64_t derived) {
  if (family.derives_sizes && fields.find(name) == nullptr && derived >= 1) return derived;
  return fields.get<std::int64_t>(name, 1, largest);
}

// Reads which layers attend: by layer_types, or every full_attention_interval-th layer.
std::vector<bool> read_layers(const Fields& fields) {
  const auto count = fields.get<std::int64_t>("num_hidden_layers", 1, kMostLayers);
  const auto interval = fields.find<std::int64_t>("full_attention_interval", 1, kMostLayers).value_or(kUsualInterval);
  std::vector<bool> attends;
  if (const auto types = fields.find<std::vector<std::string>>("layer_types")) {
    for (const auto& type : *types) {
      attends.push_back(type == "full_attention");
      if (!attends.back() && type != "linear_attention") {
        fields.refuse("layer_types", "linear_attention and full_attention alone");
      }
    }
    if (std::ssize(attends) != count) {
      fields.refuse("layer_types", "one for each of the " + std::to_string(count) + " layers");
    }
    return attends;
  }
  for (std::int64_t i = 0; i < count; ++i) attends.push_back((i + 1) % interval == 0);
  return attends;
}

MixerConfig read_mixer(const Fields& fields, const FamilyConfig& config) {
  const Family& family = *config.family;
  MixerConfig mixer;
  mixer.mixer = "gdn";
  mixer.hidden = config.hidden_size;
  mixer.heads = size_of(fields, "linear_num_key_heads", kMostHeads, family, config.heads);
  mixer.value_heads = size_of(fields, "linear_num_value_heads", kMostHeads, family, config.heads);
  mixer.key_dim = size_of(fields, "linear_key_head_dim", kMostWidth, family, 3 * mixer.hidden / (4 * mixer.heads));
  mixer.value_dim = size_of(fields, "linear_value_head_dim", kMostWidth, family, 2 * mixer.key_dim);
  mixer.conv = fields.find<std::int64_t>("linear_conv_kernel_dim", 2, kMaxConvWidth).value_or(mixer.conv);
  mixer.output_gate = OutputGate::silu;
  mixer.norm_eps = family.output_norm_eps.value_or(config.norm_eps);
  if (family.derives_sizes && fields.find<bool>("linear_allow_neg_eigval").value_or(true)) mixer.beta_scale = 2.0;
  if (mixer.value_heads % mixer.heads != 0) {
    fields.refuse("linear_num_value_heads", "a multiple of linear_num_key_heads, " + std::to_string(mixer.heads));
  }
  return mixer;
}

// Reads rope_parameters, or in older files rope_scaling, rope_theta and partial_rotary_factor beside it. M-RoPE gives
// the three parts of a position of text the same number, so that its sections do not matter.
void read_rope(const Fields& fields, FamilyConfig& config) {
  const Family& family = *config.family;
  auto theta = fields.find<double>("rope_theta");
  auto factor = fields.find<double>("partial_rotary_factor");
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (fields.find(name) == nullptr) continue;
    const Fields rope = fields.object(name);
    rope.read("rope_theta", theta);
    rope.read("partial_rotary_factor", factor);
    for (const char* type : {"rope_type", "type"}) {
      const auto got = rope.find<std::string>(type).value_or("default");
      if (got != "default" && got != "mrope") rope.refuse(type, "default, the only one that is supported");
    }
    rope.find("mrope_section");
    rope.find("mrope_interleaved");
    rope.refuse_others();
  }
  if (!theta && family.may_lack_positions) return;
  if (!theta || !(*theta > 1.0)) fields.refuse("rope_parameters", "an object with a rope_theta above 1");
  config.rope_theta = *theta;
  const double part = factor.value_or(family.partial_rotary_factor);
  if (!(part >= 0.0 && part <= 1.0)) fields.refuse("rope_parameters", "a partial_rotary_factor from 0 to 1");
  config.rotary = static_cast<std::int64_t>(static_cast<double>(config.head_dim) * part);
  if (config.rotary % 2 != 0) {
    fields.refuse("rope_parameters",
                  "an even number of rotated elements per head, not " + std::to_string(config.rotary));
  }
}

void read_attention(const Fields& fields, FamilyConfig& config) {
  const Family& family = *config.family;
  config.heads = fields.get<std::int64_t>("num_attention_heads", 1, kMostHeads);
  config.key_value_heads = size_of(fields, "num_key_value_heads", kMostHeads, family, config.heads);
  config.head_dim = size_of(fields, "head_dim", kMostWidth, family, config.hidden_size / config.heads);
  if (config.heads % config.key_value_heads != 0) {
    fields.refuse("num_key_value_heads", "a divisor of num_attention_heads, " + std::to_string(config.heads));
  }
}

// Reads which layers have experts: of every decoder_sparse_step-th layer those that are not in mlp_only_layers.
std::vector<bool> read_sparse(const Fields& fields, std::int64_t layers, const ExpertsConfig& experts) {
  const auto step = fields.find<std::int64_t>("decoder_sparse_step", 1, kMostLayers).value_or(1);
  std::vector<bool> sparse;
  for (std::int64_t i = 0; i < layers; ++i) sparse.push_back(experts.count > 0 && (i + 1) % step == 0);
  std::vector<std::int64_t> dense;
  fields.read("mlp_only_layers", dense);
  for (const auto layer : dense) {
    if (layer < 0 || layer >= layers) fields.refuse("mlp_only_layers", "numbers of layers, from 0");
    sparse[static_cast<std::size_t>(layer)] = false;
  }
  return sparse;
}

// Reads the sizes of the MLPs and of the experts.
void read_mlp(const Fields& fields, FamilyConfig& config) {
  const std::int64_t layers = config.layers();
  ExpertsConfig& experts = config.experts;
  if (config.family->has_experts) {
    experts.count = fields.get<std::int64_t>("num_experts", 0, kMostExperts);
    const std::int64_t least = experts.count > 0 ? 1 : 0;
    const auto size = [&](const char* name, std::int64_t most) {
      return experts.count > 0 ? fields.get<std::int64_t>(name, least, most)
                               : fields.find<std::int64_t>(name, least, most).value_or(0);
    };
    experts.per_token = size("num_experts_per_tok", experts.count > 0 ? experts.count : kMostExperts);
    experts.width = size("moe_intermediate_size", kMostInner);
    experts.shared_width = size("shared_expert_intermediate_size", kMostInner);
    fields.read("norm_topk_prob", experts.normalised);
    config.sparse = read_sparse(fields, layers, experts);
  } else {
    allow_values(fields, "mlp_only_layers", {json::array()});
    config.sparse.assign(static_cast<std::size_t>(layers), false);
  }
  const bool all_sparse = std::ranges::find(config.sparse, false) == config.sparse.end();
  config.intermediate_size = all_sparse ? fields.find<std::int64_t>("intermediate_size", 0, kMostInner).value_or(0)
                                        : fields.get<std::int64_t>("intermediate_size", 1, kMostInner);
}

// Reads the fields of the text model, in config.json or in its text_config.
void read_text(const Fields& fields, FamilyConfig& config) {
  config.vocab_size = fields.get<std::int64_t>("vocab_size", 1, kMostIds);
  config.hidden_size = fields.get<std::int64_t>("hidden_size", 1, kMostWidth);
  config.norm_eps = fields.find<double>("rms_norm_eps").value_or(config.norm_eps);
  if (!(config.norm_eps > 0.0)) fields.refuse("rms_norm_eps", "a positive number");
  config.attends = read_layers(fields);
  read_mlp(fields, config);
  read_attention(fields, config);
  config.mixer = read_mixer(fields, config);
  fields.check([&] { validate(config.mixer); });
  read_rope(fields, config);
  fields.read("tie_word_embeddings", config.tied);
  fields.read("bos_token_id", config.bos);
  if (fields.find("eos_token_id") != nullptr) read_eos_token_id(fields, config.eos);
  allow_values(fields, "attention_bias", {false});
  allow_values(fields, "attn_output_gate", {config.family->gated_attention});
  allow_values(fields, "mamba_ssm_dtype", {"float32"});
  for (const char* name : kTrainingFields) fields.find(name);
  read_quantization(fields);
  read_other_fields(fields);
  fields.refuse_others();
}

}  // namespace

FamilyConfig family_config_from_json(const Fields& fields) {
  const auto type = fields.get<std::string>("model_type");
  FamilyConfig config;
  config.family = find_family(type);
  if (config.family == nullptr) fields.refuse("model_type", "a family of hybrid models");
  const Family& family = *config.family;
  if (!family.lacks.empty()) {
    fields.refuse("model_type", "a family without " + std::string(family.lacks) + ", which efla does not have");
  }
  if (type != family.model_type || family.text_type.empty()) {
    read_text(fields, config);
    return config;
  }
  fields.read("tie_word_embeddings", config.tied);
  fields.read("bos_token_id", config.bos);
  read_eos_token_id(fields, config.eos);
  const Fields text = fields.object("text_config");
  if (text.find<std::string>("model_type").value_or(std::string(family.text_type)) != family.text_type) {
    text.refuse("model_type", std::string(family.text_type));
  }
  read_text(text, config);
  for (const char* name : kVisionFields) fields.find(name);
  fields.find("pad_token_id");
  read_quantization(fields);
  read_other_fields(fields);
  fields.refuse_others();
  return config;
}

bool is_family_folder(const fs::path& folder) {
  if (is_gguf(folder)) return true;
  const auto file = folder / kConfigFile;
  if (!fs::exists(file)) return false;
  const auto content = io::read_json(file);
  const auto* type = content.is_object() && content.contains("model_type") ? &content["model_type"] : nullptr;
  return type != nullptr && type->is_string() && find_family(type->get<std::string>()) != nullptr;
}

FamilyConfig load_family_config(const fs::path& folder) {
  if (is_gguf(folder)) {
    return family_config_from_json({gguf_config(io::GgufFile(folder)), io::refuse_in_file(folder.string())});
  }
  const auto file = folder / kConfigFile, generation_file = folder / kGenerationFile;
  const auto content = io::read_json(file);
  auto config = family_config_from_json({content, io::refuse_in_file(file.string())});
  if (!fs::exists(generation_file)) return config;
  const auto generation = io::read_json(generation_file);
  const Fields fields(generation, io::refuse_in_file(generation_file.string()));
  if (fields.find("eos_token_id") != nullptr) read_eos_token_id(fields, config.eos);
  return config;
}

}  // namespace efla::nn
