// The configuration of a model of a family in a GGUF file.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "efla/io/gguf/gguf.h"

namespace efla::nn {

using io::is_gguf;

// Returns the config.json that transformers would have for the model. Throws IoError(content) for another architecture
// than qwen35, a key that is missing, and values that efla does not support.
nlohmann::json gguf_config(const io::GgufFile& file);

}  // namespace efla::nn
