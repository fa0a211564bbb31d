// TOML files, read as JSON values: tables become objects.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace efla::io {

// Throws IoError(content) with line, column and byte offset where the text is not TOML, and for dates and times, which
// JSON does not have.
nlohmann::json read_toml(const std::filesystem::path& path);

// The same of a text; name is for messages.
nlohmann::json parse_toml(std::string_view text, const std::string& name);

}  // namespace efla::io
