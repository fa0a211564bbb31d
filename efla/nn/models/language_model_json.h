// Configurations of language models as JSON: config.json of checkpoints, and tables of TOML files.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/fields.h"
#include "efla/nn/models/language_model_config.h"

namespace efla::nn {

// Returns the content of a config.json. Its model_type is delta_net, gated_deltanet or kda if flash-linear-attention
// has the model; otherwise it is efla, with the field mixer and the same other names.
nlohmann::json to_json(const LanguageModelConfig& config);

// Parses a config.json of those model types. A missing field has the default of its type. Throws for a field that is
// unknown (with the nearest name), has another type, or has an unsupported value.
LanguageModelConfig language_model_config_from_json(const io::Fields& fields);

// Parses a configuration that a user wrote: fields of model_type efla, which override those of the preset in `preset`.
LanguageModelConfig language_model_config_from_table(const io::Fields& fields);

// Returns a preset: efla-340m and efla-1.3b follow section 5.2 and appendix A of EFLA, the others are smaller;
// docs/checkpoints.md lists them. Throws Error with the nearest name.
LanguageModelConfig language_model_preset(std::string_view name);
std::vector<std::string> language_model_presets();

}  // namespace efla::nn
