// Lines of a user, one at a time.
#pragma once

#include <optional>
#include <string>

namespace efla::cli {

// Returns the next line of standard input without its newline; nothing at the end of the input. On a terminal it prints
// "> " first, and Ctrl-C drops the line and says how to leave.
std::optional<std::string> read_line();

}  // namespace efla::cli
