// Files that commands write their results to.
#pragma once

#include <filesystem>
#include <string>

namespace efla::cli {

// Throws Error about --out unless a regular file can be there: a long computation must not end with an output that
// cannot be written.
void check_output_file(const std::string& command, const std::filesystem::path& out);

}  // namespace efla::cli
