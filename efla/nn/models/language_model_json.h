// Configurations of language models as JSON: config.json of checkpoints, and tables of TOML files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/fields.h"
#include "efla/nn/models/language_model_config.h"

namespace efla::nn {

// Returns the content of a config.json. The model_type is delta_net, gated_deltanet or kda if flash-linear-attention
// has the model. Otherwise the model_type is efla, the field mixer names the mixer, and the other fields have the same
// names.
nlohmann::json to_json(const LanguageModelConfig& config);

// Parses a config.json of one of these model types. A missing field has the default of the model type. Throws for a
// field that is unknown (with the nearest name), has another type, or has an unsupported value.
LanguageModelConfig language_model_config_from_json(const io::Fields& fields);

// Parses a configuration that a user wrote: fields of model_type efla, which override the fields of the preset that the
// field `preset` names. Throws for fields as above.
LanguageModelConfig language_model_config_from_table(const io::Fields& fields);

// Returns a preset by name: efla-340m and efla-1.3b follow section 5.2 and appendix A of EFLA, the others are smaller;
// docs/checkpoints.md lists them. Throws Error with the nearest name.
LanguageModelConfig language_model_preset(std::string_view name);
std::vector<std::string> language_model_presets();

}  // namespace efla::nn
