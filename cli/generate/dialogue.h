// Lines of a user, one at a time.
#pragma once

#include <optional>
#include <string>

namespace efla::cli {

// The next line of standard input without its newline, after "> " where it is a terminal; none at its end. Ctrl-C there
// drops the line and says how to leave.
std::optional<std::string> read_line();

}  // namespace efla::cli
