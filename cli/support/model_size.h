// The size of a language model of any kind that efla runs.
#pragma once

#include <cstdint>
#include <filesystem>

#include "efla/nn/families/family_config.h"
#include "efla/nn/models/language_model_file.h"

namespace efla::cli {

struct ModelSize {
  std::int64_t layers = 0, width = 0;
};

// Reads the size from the configuration of a model's folder, or of a run's. Throws IoError for mistakes in it.
inline ModelSize model_size(const std::filesystem::path& path) {
  if (nn::is_family_folder(path)) {
    const auto config = nn::load_family_config(path);
    return {config.layers(), config.hidden_size};
  }
  const auto config = nn::load_language_model_config(path);
  return {config.num_hidden_layers, config.hidden_size};
}

}  // namespace efla::cli
