// Language models in folders: config.json and model.safetensors, as Hugging Face and flash-linear-attention have them.
#pragma once

#include <filesystem>
#include <memory>

#include "efla/nn/models/language_model.h"

namespace efla::nn {

// The folder that holds the model of `path`: path itself where it has a config.json, otherwise the latest checkpoint of
// a training run there (checkpoints/step-N, the largest N). Throws IoError(missing) where there is none.
std::filesystem::path language_model_folder(const std::filesystem::path& path);

// The configuration of the model in that folder. Throws IoError, and Error as language_model_config_from_json.
LanguageModelConfig load_language_model_config(const std::filesystem::path& path);

// The model of language_model_folder(path), its weights widened to float32. Throws IoError(content) for a tensor that
// is missing, not the model's, or of another shape.
std::shared_ptr<LanguageModel> load_language_model(const std::filesystem::path& path);

// Writes config.json and model.safetensors (float32) into a folder that exists; each is whole or as before. Throws
// IoError.
void save_language_model(const LanguageModel& model, const std::filesystem::path& folder);

}  // namespace efla::nn
