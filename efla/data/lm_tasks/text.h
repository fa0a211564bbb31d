// String functions with the semantics of Python's str, on UTF-8, as the harness's prompts need them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace efla::data {

// Remove the (Unicode) white space at the start, at the end, or both.
std::string_view lstrip(std::string_view text);
std::string_view rstrip(std::string_view text);
std::string_view strip(std::string_view text);

// Returns the number of pieces between runs of white space. A run at the start or at the end adds an empty piece; ""
// has one piece.
std::int64_t count_words(std::string_view text);

// Returns the number of Unicode code points.
std::int64_t count_characters(std::string_view text);

// Changes the first letter to upper case and the others to lower case; letters outside of ASCII stay.
std::string capitalize(std::string_view text);

// Replaces every occurrence, from left to right, without overlaps.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

}  // namespace efla::data
