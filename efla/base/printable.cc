#include "efla/base/printable.h"

#include <algorithm>

#include "efla/base/utf8.h"

namespace efla {
namespace {

// Returns whether first ≤ character ≤ last as code points. UTF-8 characters of the same size have the order of their
// code points. All three are whole characters.
bool is_within(std::string_view character, std::string_view first, std::string_view last) {
  return character.size() == first.size() && first <= character && character <= last;
}

bool is_control(std::string_view character) {
  return character.size() == 1
             ? static_cast<unsigned char>(character[0]) < 0x20 || character[0] == 0x7f
             : is_within(character, "\u0080", "\u009f") || character == "\u061c" ||
                   is_within(character, "\u200e", "\u200f") || is_within(character, "\u2028", "\u202e") ||
                   is_within(character, "\u2066", "\u2069");
}

}  // namespace

std::string printable(std::string_view text, std::size_t longest) {
  std::string shown;
  for (std::size_t i = 0; i < text.size();) {
    const int found = utf8_character(text.substr(i));
    const auto size = static_cast<std::size_t>(std::max(found, 1));
    if (i + size > longest) return shown + "…";
    const auto character = text.substr(i, size);
    shown += found < 1 || is_control(character) ? "?" : character;
    i += size;
  }
  return shown;
}

}  // namespace efla
