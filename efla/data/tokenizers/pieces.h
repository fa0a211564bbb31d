// The texts of tokens in which a character stands for a space, as SentencePiece writes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_set>

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

// The pairs of characters that stand side by side in a token. Between the characters of any other pair a text can be
// cut.
class JoinedCharacters {
 public:
  // Adds all pairs of neighbouring characters in the text of a token.
  void add_all(std::string_view text);

  // Returns the last place in a text between two whole characters that are no such pair, where `allowed(place,
  // character before, character behind)` holds; 0: none. The text has spaces, and the two characters have kSpaceMark
  // for a space.
  using Allowed = std::function<bool(std::size_t, std::string_view, std::string_view)>;
  std::size_t last_break(std::string_view text, const Allowed& allowed) const;

 private:
  std::unordered_set<std::uint64_t> pairs_;
};

}  // namespace efla::data
