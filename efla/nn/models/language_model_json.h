// Language models' configurations as JSON: config.json of checkpoints, and tables of TOML files.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "efla/nn/models/language_model_config.h"

namespace efla::nn {

// The content of a config.json: of model_type delta_net, gated_deltanet or kda where flash-linear-attention has the
// model, otherwise efla, with the field mixer and the same names.
nlohmann::json to_json(const LanguageModelConfig& config);

// The reverse, for those model types and others' files of them; fields that are not given have the defaults of the
// type. Throws Error with `source` as its operation for a field that is unknown (with the nearest name), of another
// type, or asks for what these models do not have.
LanguageModelConfig language_model_config_from_json(const nlohmann::json& json,
                                                    const std::string& source = "config.json");

// A configuration as users write it: fields of model_type efla over those of the preset that `preset` names.
LanguageModelConfig language_model_config_from_table(const nlohmann::json& table, const std::string& source);

// efla-340m and efla-1.3b as section 5.2 and appendix A of the EFLA paper have them, and smaller ones; docs/models.md
// lists them. Throws Error with the nearest name.
LanguageModelConfig language_model_preset(std::string_view name);
std::vector<std::string> language_model_presets();

}  // namespace efla::nn
