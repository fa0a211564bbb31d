// TOML files, read as JSON values: tables become objects.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace efla::io {

// Reads a TOML file. Throws IoError(content) with line, column and byte offset if the text is not TOML, and for dates
// and times, because JSON has neither.
nlohmann::json read_toml(const std::filesystem::path& path);

// Parses a text in the same way. name is for messages.
nlohmann::json parse_toml(std::string_view text, const std::string& name);

}  // namespace efla::io
