// UTF-8 (RFC 3629).
#pragma once

#include <cstddef>
#include <string_view>

namespace efla::data {

inline constexpr std::string_view kReplacementCharacter = "\uFFFD";

// The bytes of the character that a text begins with, 1 to 4; 0 where it begins with none, −1 where the text ends
// before the character does. The text is not empty.
int utf8_character(std::string_view text);

// The bytes of the whole characters that a text begins with: its size where all of it is UTF-8.
std::size_t utf8_prefix(std::string_view text);

}  // namespace efla::data
