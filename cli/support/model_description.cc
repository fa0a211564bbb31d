#include "cli/support/model_description.h"

#include "efla/nn/families/family_model.h"
#include "efla/nn/models/language_model_file.h"

namespace efla::cli {
namespace {

nlohmann::ordered_json description_of(const nn::FamilyModel& model) {
  const nn::FamilyConfig& config = model.config();
  return {{"model_type", config.family->model_type},
          {"layers_delta_rule", config.layers() - config.attention_layers()},
          {"layers_attention", config.attention_layers()},
          {"hidden_size", config.hidden_size},
          {"vocab_size", config.vocab_size},
          {"parameters", model.parameters()},
          {"weight_bytes", model.weight_bytes()},
          {"bytes_per_text", model.constant_bytes()},
          {"bytes_per_token", model.page_bytes() / kAttentionBlock},
          {"skipped_tensors", model.skipped_tensors()}};
}

nlohmann::ordered_json description_of(const nn::LanguageModel& model) {
  const nn::LanguageModelConfig& config = model.config();
  std::int64_t attention = 0, weight_bytes = 0;
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) attention += config.is_attention(i) ? 1 : 0;
  for (const auto& parameter : model.parameters()) weight_bytes += static_cast<std::int64_t>(parameter.nbytes());
  const nn::AttentionConfig heads = config.attention_config();
  const std::int64_t token_floats = 2 * attention * heads.key_value_heads * (heads.hidden / heads.heads);
  return {{"model_type", config.mixer},
          {"layers_delta_rule", config.num_hidden_layers - attention},
          {"layers_attention", attention},
          {"hidden_size", config.hidden_size},
          {"vocab_size", config.vocab_size},
          {"parameters", model.parameter_count()},
          {"weight_bytes", weight_bytes},
          {"bytes_per_text", model.initial_state(1).bytes()},
          {"bytes_per_token", token_floats * std::int64_t{sizeof(float)}},
          {"skipped_tensors", 0}};
}

}  // namespace

nlohmann::ordered_json model_description(const std::filesystem::path& path) {
  if (nn::is_family_folder(path)) return description_of(nn::FamilyModel(path, nn::WeightType::float32));
  return description_of(*nn::load_language_model(path));
}

}  // namespace efla::cli
