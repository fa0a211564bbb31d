#include "efla/io/json_text.h"

#include <algorithm>
#include <charconv>

#include "efla/base/utf8.h"

namespace efla::io {
namespace {

constexpr std::string_view kHex = "0123456789abcdef";

// Appends a character that a string of JSON cannot have as it is.
void append_escaped(std::string& out, char c) {
  constexpr std::string_view kNamed = "\"\\\b\f\n\r\t", kNames = "\"\\bfnrt";
  const auto named = kNamed.find(c);
  out += '\\';
  if (named != std::string_view::npos) {
    out += kNames[named];
  } else {
    out += "u00";
    out += {kHex[static_cast<unsigned char>(c) >> 4], kHex[static_cast<unsigned char>(c) & 15]};
  }
}

}  // namespace

JsonText::JsonText(std::string_view text) {
  text_.reserve(text.size() + 2);
  text_ += '"';
  const auto plain = [](char c) { return c >= ' ' && c < '\x7f' && c != '"' && c != '\\'; };
  while (!text.empty()) {
    const auto end = static_cast<std::size_t>(std::find_if_not(text.begin(), text.end(), plain) - text.begin());
    text_ += text.substr(0, end);
    text.remove_prefix(end);
    if (text.empty()) break;
    const int size = utf8_character(text);
    if (size > 1) {
      text_ += text.substr(0, static_cast<std::size_t>(size));
    } else if (size == 1 && text.front() == '\x7f') {
      text_ += text.front();
    } else if (size == 1) {
      append_escaped(text_, text.front());
    } else {
      text_ += kReplacementCharacter;
    }
    text.remove_prefix(static_cast<std::size_t>(std::max(size, 1)));
  }
  text_ += '"';
}

JsonText::JsonText(std::initializer_list<Member> members) : text_("{}") {
  for (const auto& [name, value] : members) add(name, value);
}

void JsonText::append(std::string_view name, std::string_view value) {
  const char end = text_.back();
  text_.pop_back();
  if (text_.size() > 1) text_ += ',';
  text_ += name;
  text_ += value;
  text_ += end;
}

void JsonText::push_back(const JsonText& value) { append("", value.text_); }

void JsonText::add(std::string_view name, const JsonText& value) { append(JsonText(name).text_ + ":", value.text_); }

void JsonText::add_all(const JsonText& object) {
  if (!object.is_empty()) append("", std::string_view(object.text_).substr(1, object.text_.size() - 2));
}

std::string JsonText::number(double value) {
  if (!std::isfinite(value)) return "null";  // JSON has no such number
  char digits[32];
  std::string text(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";  // so that readers see that it is no whole number
  return text;
}

}  // namespace efla::io
