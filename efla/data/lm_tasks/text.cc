#include "efla/data/lm_tasks/text.h"

#include <algorithm>
#include <array>

namespace efla::data {
namespace {

// White space in UTF-8, as defined by str.isspace() of Python 3, for code points up to U+3000.
constexpr std::array<std::string_view, 29> kSpaces{
    " ",      "\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",   "\x1d",   "\x1e",   "\x1f",
    "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
    "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};

// Return the size of the white-space character at the start or at the end of a text; 0 if there is none.
std::size_t space_at_start(std::string_view text) {
  const auto found =
      std::find_if(kSpaces.begin(), kSpaces.end(), [&](std::string_view space) { return text.starts_with(space); });
  return found == kSpaces.end() ? 0 : found->size();
}

std::size_t space_at_end(std::string_view text) {
  const auto found =
      std::find_if(kSpaces.begin(), kSpaces.end(), [&](std::string_view space) { return text.ends_with(space); });
  return found == kSpaces.end() ? 0 : found->size();
}

bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

}  // namespace

std::string_view lstrip(std::string_view text) {
  while (const auto size = space_at_start(text)) text.remove_prefix(size);
  return text;
}

std::string_view rstrip(std::string_view text) {
  while (const auto size = space_at_end(text)) text.remove_suffix(size);
  return text;
}

std::string_view strip(std::string_view text) { return lstrip(rstrip(text)); }

std::int64_t count_words(std::string_view text) {
  std::int64_t words = 1;
  for (bool in_space = false; !text.empty();) {
    const auto size = space_at_start(text);
    words += size > 0 && !in_space;
    in_space = size > 0;
    text.remove_prefix(std::max<std::size_t>(size, 1));
  }
  return words;
}

std::int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char byte) { return !continues_character(byte); });
}

std::string capitalize(std::string_view text) {
  std::string result(text);
  for (std::size_t i = 0; i < result.size(); ++i) {
    char& c = result[i];
    if (i == 0 && c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    if (i > 0 && c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  result.reserve(text.size());
  for (;;) {
    const auto found = text.find(from);
    result += text.substr(0, found);
    if (found == std::string_view::npos) return result;
    result += to;
    text.remove_prefix(found + from.size());
  }
}

}  // namespace efla::data
