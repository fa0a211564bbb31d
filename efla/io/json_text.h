// JSON that is written, not read: a value is its text, so that a reply takes the memory of its bytes and no tree.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace efla::io {

// A value of JSON as text. Lists and objects are written from the first element or member to the last one.
class JsonText {
 public:
  using Member = std::pair<std::string_view, JsonText>;

  JsonText(std::nullptr_t = nullptr) : text_("null") {}
  JsonText(bool value) : text_(value ? "true" : "false") {}
  JsonText(std::integral auto value) : text_(std::to_string(value)) {}
  JsonText(std::floating_point auto value) : text_(number(static_cast<double>(value))) {}
  // Bytes that are not UTF-8 become U+FFFD.
  JsonText(std::string_view text);
  JsonText(const std::string& text) : JsonText(std::string_view(text)) {}
  JsonText(const char* text) : JsonText(std::string_view(text)) {}
  // An object.
  JsonText(std::initializer_list<Member> members);

  static JsonText array() { return JsonText(Brackets(), "[]"); }
  static JsonText object() { return JsonText(Brackets(), "{}"); }
  // A value whose JSON is known. The text must be JSON.
  static JsonText json(std::string text) { return JsonText(Brackets(), std::move(text)); }

  // Appends an element to a list.
  void push_back(const JsonText& value);
  // Appends a member to an object, which must not have one of this name.
  void add(std::string_view name, const JsonText& value);
  // Appends the members of another object.
  void add_all(const JsonText& object);

  bool is_empty() const { return text_.size() == 2; }  // of a list or an object

  const std::string& text() const& { return text_; }
  std::string text() && { return std::move(text_); }

 private:
  struct Brackets {};
  JsonText(Brackets, std::string text) : text_(std::move(text)) {}

  static std::string number(double value);
  void append(std::string_view name, std::string_view value);

  std::string text_;
};

}  // namespace efla::io
