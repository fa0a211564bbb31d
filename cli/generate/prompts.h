// Prompts of a file.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace efla::cli {

// Returns the lines of a file; of .jsonl and .ndjson files the field "prompt" of each line's object. Ignores a
// byte-order mark, and blank lines at the end. Throws IoError(content) with the line and the byte offset for a line
// that is not UTF-8, or not such an object, and Error for a file without a prompt.
std::vector<std::string> read_prompts(const std::filesystem::path& path);

}  // namespace efla::cli
