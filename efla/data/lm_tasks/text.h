// Text as Python's str methods see it, on UTF-8: what the harness's prompts are made with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace efla::data {

// Without the white space (Unicode's) at the start, the end, or both.
std::string_view lstrip(std::string_view text);
std::string_view rstrip(std::string_view text);
std::string_view strip(std::string_view text);

// Pieces between runs of white space, with an empty one before a run at the start and after one at the end: 1 for "".
std::int64_t count_words(std::string_view text);

// Unicode code points.
std::int64_t count_characters(std::string_view text);

// The first letter in upper case and the others in lower case, where they are ASCII's; other letters stay.
std::string capitalize(std::string_view text);

// Every occurrence, left to right; none overlaps the one before.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

}  // namespace efla::data
