// The tools that a model may call.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace efla::serve {

// A tool. types: the types of JSON that its schema lets a parameter have, by the parameter's name; none: any. schema:
// as prepared_schema returns it, where calls must follow it.
struct Tool {
  std::string name;
  std::map<std::string, std::vector<std::string>> types = {};
  std::string schema = {};
};

// Returns the tool of a name and a JSON schema of its arguments.
Tool make_tool(std::string name, const nlohmann::json& schema);

// Returns a parameter's text as JSON of one of these types. A text that is of none of the types, or has none, becomes a
// string.
std::string coerced(std::string_view text, const std::vector<std::string>& types);

}  // namespace efla::serve
