// The kind and the size of a language model of any kind that efla runs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "efla/nn/families/family_config.h"
#include "efla/nn/models/language_model_file.h"

namespace efla::nn {

struct ModelSize {
  std::string kind;  // the mixer, or a family's model_type
  std::int64_t layers = 0, width = 0, vocab_size = 0;
};

// Reads them from the configuration of a model's folder, or of a run's. Throws IoError for mistakes in it.
inline ModelSize model_size(const std::filesystem::path& path) {
  if (is_family_folder(path)) {
    const auto config = load_family_config(path);
    return {std::string(config.family->model_type), config.layers(), config.hidden_size, config.vocab_size};
  }
  const auto config = load_language_model_config(path);
  return {config.mixer, config.num_hidden_layers, config.hidden_size, config.vocab_size};
}

}  // namespace efla::nn
