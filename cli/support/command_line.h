// Command lines as text that a shell reads.
#pragma once

#include <string>

namespace efla::cli {

// Returns one word of a command line, in quotes where a shell needs them.
std::string shell_word(const std::string& word);

// Returns the command line of this process.
std::string command_line();

}  // namespace efla::cli
