// Parts of a JSON text as they were written: with their order of names, and where the text may end too early.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace efla::serve {

inline constexpr std::string_view kBlanks = " \t\n\r";  // between the tokens of JSON

// Returns the number of bytes of the value that begins a text; npos where the text ends before the value does. A number
// or a word ends with the text too. Checks nothing beyond quotation marks and brackets.
std::size_t json_value_size(std::string_view text);

// A member of an object. whole: the text does not end before the value does.
struct JsonMember {
  std::string name;
  std::string_view value;
  bool whole = true;
};

// Returns the members of the object that begins a text, in order. Ends where the text ends, or is not JSON.
std::vector<JsonMember> json_members(std::string_view text);

// Returns the elements of the list that begins a text, in order. Ends where the text ends, or is not JSON.
std::vector<std::string_view> json_elements(std::string_view text);

// Returns the value of a member as it was written; "" where the object has none of this name. Of several members of the
// name the last one counts.
std::string_view json_member(std::string_view object, std::string_view name);

// Returns whether a text is JSON.
bool is_json(std::string_view text);

// Returns whether a text is one JSON object that is nested at most 256 levels deep.
bool is_json_object(std::string_view text);

}  // namespace efla::serve
