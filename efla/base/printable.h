// Texts from foreign files, as messages show them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace efla {

// Returns the text with '?' in place of each character that could command a terminal, begin a line or reorder a line:
// control characters (U+0000 to U+001F, U+007F to U+009F), line and paragraph separators, bidirectional controls, and
// bytes that are not UTF-8. A text of more than `longest` bytes is cut at a character and ends with "…".
std::string printable(std::string_view text, std::size_t longest = SIZE_MAX);

}  // namespace efla
