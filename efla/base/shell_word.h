#pragma once

#include <string>

namespace efla {

// Returns one word of a command line, in quotes where a shell needs them.
std::string shell_word(const std::string& word);

}  // namespace efla
