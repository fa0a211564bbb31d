// Language models in folders: config.json and model.safetensors, as Hugging Face and flash-linear-attention write them.
#pragma once

#include <filesystem>
#include <memory>

#include "efla/nn/models/language_model.h"

namespace efla::nn {

// Returns the folder that holds the model of `path`: path itself if it has a config.json or is a GGUF file, otherwise
// the latest checkpoint of a training run (checkpoints/step-N with the largest N). Throws IoError(missing) if there is
// none.
std::filesystem::path language_model_folder(const std::filesystem::path& path);

// Loads the configuration of the model in language_model_folder(path). The eos_token_id of a generation_config.json in
// the folder replaces the one in config.json, as in transformers. Throws IoError.
LanguageModelConfig load_language_model_config(const std::filesystem::path& path);

// Loads the model in language_model_folder(path), widens its weights to float32 and puts them on the device. Throws
// IoError(content) for a tensor that is missing, unknown, or of another shape, and for a head that differs from the
// embeddings to which it is tied.
std::shared_ptr<LanguageModel> load_language_model(const std::filesystem::path& path,
                                                   torch::Device device = torch::kCPU);

// Writes config.json, model.safetensors (float32) and, unless the model type is one that the Python package does not
// have, efla_model.py, which loads the model in transformers, to an existing folder. Each file is written whole or not
// at all. Throws IoError.
void save_language_model(const LanguageModel& model, const std::filesystem::path& folder);

}  // namespace efla::nn
