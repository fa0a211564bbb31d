// The texts of tokens in which a character stands for a space, as SentencePiece writes them.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace efla::data {

inline constexpr std::string_view kSpaceMark = "\u2581";  // stands for a space

// Return a text with kSpaceMark for spaces, and with spaces for kSpaceMark.
std::string with_marks(std::string_view text);
std::string with_spaces(std::string_view text);

// Returns the end of the word that starts at a place of a text with kSpaceMark for spaces: spaces, and what follows up
// to the next space.
std::size_t word_end(std::string_view text, std::size_t begin);

// Returns the byte of a piece such as "<0x0A>"; −1 for any other piece.
int byte_of(std::string_view piece);

// Returns the last space of a text at which a word ends and another one begins: a single space between complete
// characters, where `allowed(last byte before, first byte behind)` holds. 0: none.
std::size_t last_word_break(std::string_view text, const std::function<bool(char, char)>& allowed);

}  // namespace efla::data
