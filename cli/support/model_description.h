// What efla info says about a language model.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace efla::cli {

// Returns the model's kind, sizes, and memory in bytes: of the weights, of a text of any length, and of each of its
// tokens. Throws IoError for a folder without a model that efla runs.
nlohmann::ordered_json model_description(const std::filesystem::path& path);

}  // namespace efla::cli
