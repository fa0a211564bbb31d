#include "efla/serve/chat/json_slices.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace efla::serve {
namespace {

void skip_blanks(std::string_view& text) { text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size())); }

// Skips blanks and then a character. Returns whether the text had it.
bool skip(std::string_view& text, char character) {
  skip_blanks(text);
  if (!text.starts_with(character)) return false;
  text.remove_prefix(1);
  return true;
}

// Returns the number of bytes of the string that begins a text.
std::size_t string_size(std::string_view text) {
  for (std::size_t i = 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      return i + 1;
    }
  }
  return std::string_view::npos;
}

}  // namespace

std::size_t json_value_size(std::string_view text) {
  if (text.starts_with('"')) return string_size(text);
  if (!text.starts_with('{') && !text.starts_with('[')) {
    return std::min(text.find_first_of(",]}: \t\n\r\"[{"), text.size());
  }
  std::size_t depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') {
      const auto size = string_size(text.substr(i));
      if (size == std::string_view::npos) return size;
      i += size - 1;
    } else if (text[i] == '{' || text[i] == '[') {
      ++depth;
    } else if ((text[i] == '}' || text[i] == ']') && --depth == 0) {
      return i + 1;
    }
  }
  return std::string_view::npos;
}

std::vector<JsonMember> json_members(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // which parsers of JSON skip, too
  std::vector<JsonMember> members;
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  if (!skip(text, '{')) return members;
  do {
    skip_blanks(text);
    const auto size = text.starts_with('"') ? string_size(text) : std::string_view::npos;
    if (size == std::string_view::npos) break;
    const auto name = nlohmann::json::parse(text.substr(0, size), nullptr, /*allow_exceptions=*/false);
    text.remove_prefix(size);
    if (!name.is_string() || !skip(text, ':')) break;
    skip_blanks(text);
    const auto value = json_value_size(text);
    members.push_back({name.get<std::string>(), text.substr(0, value), value < text.size()});
    text.remove_prefix(std::min(value, text.size()));
  } while (skip(text, ','));
  return members;
}

std::vector<std::string_view> json_elements(std::string_view text) {
  std::vector<std::string_view> elements;
  if (!skip(text, '[')) return elements;
  do {
    skip_blanks(text);
    const auto size = json_value_size(text);
    if (size == std::string_view::npos || size == 0) break;
    elements.push_back(text.substr(0, size));
    text.remove_prefix(size);
  } while (skip(text, ','));
  return elements;
}

std::string_view json_member(std::string_view object, std::string_view name) {
  std::string_view value;
  for (const auto& member : json_members(object)) {
    if (member.name == name) value = member.value;
  }
  return value;
}

namespace {

// Returns a text of JSON with at most two digits in a row outside of strings.
std::string with_short_numbers(std::string_view text) {
  constexpr std::size_t kMost = 2;
  std::string shortened;
  std::size_t digits = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') {
      const auto size = std::min(string_size(text.substr(i)), text.size() - i);
      shortened += text.substr(i, size);
      i += size - 1;
      digits = 0;
      continue;
    }
    digits = text[i] >= '0' && text[i] <= '9' ? digits + 1 : 0;
    if (digits <= kMost) shortened += text[i];
  }
  return shortened;
}

}  // namespace

bool is_json(std::string_view text) {
  if (text.find('\0') != std::string_view::npos) return false;  // where the parser ends
  if (nlohmann::json::accept(text)) return true;
  // The parser refuses numbers beyond float64, which are JSON too.
  return nlohmann::json::accept(with_short_numbers(text));
}

bool is_json_object(std::string_view text) {
  constexpr std::size_t kDeepest = 256;
  std::size_t depth = 0, deepest = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') {
      const auto size = string_size(text.substr(i));
      if (size == std::string_view::npos) return false;
      i += size - 1;
    } else if (text[i] == '{' || text[i] == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (text[i] == '}' || text[i] == ']') {
      depth -= depth > 0 ? 1 : 0;
    }
  }
  const auto begin = text.find_first_not_of(kBlanks);
  return deepest <= kDeepest && begin != std::string_view::npos && text[begin] == '{' && is_json(text);
}

}  // namespace efla::serve
