// UTF-8 (RFC 3629).
#pragma once

#include <cstddef>
#include <string_view>

namespace efla {

inline constexpr std::string_view kReplacementCharacter = "\uFFFD";
inline constexpr std::string_view kByteOrderMark = "\uFEFF";

// Returns the size of the character at the start of a text, 1 to 4 bytes; 0 if the text starts with no valid character;
// −1 if the text ends before the character does. The text must not be empty.
int utf8_character(std::string_view text);

// Returns the size of what one U+FFFD replaces at the start of a text that starts with no whole character: the bytes
// that may begin a character, or else one byte ("maximal subpart", Unicode 3.9). The text must not be empty.
std::size_t utf8_maximal_part(std::string_view text);

// Returns the size of the valid whole characters at the start of a text: its own size if all of it is UTF-8.
std::size_t utf8_prefix(std::string_view text);

// Returns the first character of a text. A byte that begins no whole character counts as one. The text must not be
// empty.
std::string_view utf8_first(std::string_view text);

// Returns the place where the last character of a text begins, which may be incomplete: the last byte that does not
// continue a character. 0 for an empty text.
std::size_t utf8_last(std::string_view text);

}  // namespace efla
