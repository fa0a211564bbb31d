// Files that commands write their results to.
#pragma once

#include <filesystem>
#include <string>

namespace efla::cli {

// Throws Error about the option unless `out` can be a regular file and is not the command's input, because a long
// computation must not end with an output that cannot be written or that replaces its input. Removes the temporary
// files that killed processes left of this output.
void check_output_file(const std::string& command, const std::string& option, const std::filesystem::path& out,
                       const std::filesystem::path& input = {});

}  // namespace efla::cli
