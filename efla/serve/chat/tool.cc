#include "efla/serve/chat/tool.h"

#include <algorithm>
#include <utility>

#include "efla/io/json_text.h"
#include "efla/serve/chat/json_slices.h"

namespace efla::serve {
namespace {

using nlohmann::json;

// Returns the schema that {"$ref": "#/…"} stands for; null for another place.
const json* referenced(const json& root, const json& uri) {
  if (!uri.is_string() || !uri.get_ref<const std::string&>().starts_with("#/")) return nullptr;
  try {
    return &root.at(json::json_pointer(uri.get_ref<const std::string&>().substr(1)));
  } catch (const json::exception&) {
    return nullptr;
  }
}

// Appends the types that a schema names, also in its constants, anyOf, oneOf, allOf and $ref. Checks nothing, because
// the model sees the schema as it is.
void add_types(const json& root, const json& schema, std::vector<std::string>& types, int depth = 0) {
  constexpr int kDeepest = 8;
  if (!schema.is_object() || depth > kDeepest) return;
  if (const auto ref = schema.find("$ref"); ref != schema.end()) {
    if (const auto* described = referenced(root, *ref)) add_types(root, *described, types, depth + 1);
  }
  const auto add_constant = [&](const json& value) {
    const std::string type = value.type_name();
    types.push_back(value.is_number_integer() ? "integer" : type);
  };
  if (const auto value = schema.find("const"); value != schema.end()) add_constant(*value);
  if (const auto values = schema.find("enum"); values != schema.end() && values->is_array()) {
    std::for_each(values->begin(), values->end(), add_constant);
  }
  const auto add = [&](const json& type) {
    if (type.is_string()) types.push_back(type.get<std::string>());
  };
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (type->is_array()) {
      std::for_each(type->begin(), type->end(), add);
    } else {
      add(*type);
    }
  }
  for (const char* choice : {"anyOf", "oneOf", "allOf"}) {
    const auto list = schema.find(choice);
    if (list == schema.end() || !list->is_array()) continue;
    for (const auto& one : *list) add_types(root, one, types, depth + 1);
  }
}

bool is_one_of(std::string_view text, std::initializer_list<const char*> texts) {
  return std::ranges::find(texts, text) != texts.end();
}

// Returns a text as JSON of a type; "" where it is none of this type.
std::string as_type(std::string_view text, std::string_view type) {
  if (type == "null") return is_one_of(text, {"null", "None"}) ? "null" : "";
  if (type == "boolean") {
    if (is_one_of(text, {"true", "True"})) return "true";
    return is_one_of(text, {"false", "False"}) ? "false" : "";
  }
  const bool number = type == "integer" || type == "number";
  const char first = type == "object" ? '{' : type == "array" ? '[' : '\0';
  const bool begins = number ? text.find_first_of("-0123456789") == 0 : first != '\0' && text.starts_with(first);
  return begins && is_json(text) ? std::string(text) : "";
}

}  // namespace

Tool make_tool(std::string name, const json& schema) {
  Tool tool{.name = std::move(name)};
  if (!schema.is_object() || !schema.contains("properties")) return tool;
  const auto& properties = schema.at("properties");
  if (!properties.is_object()) return tool;
  for (const auto& [parameter, described] : properties.items()) add_types(schema, described, tool.types[parameter]);
  return tool;
}

std::string coerced(std::string_view text, const std::vector<std::string>& types) {
  const auto begin = std::min(text.find_first_not_of(" \t\n\r"), text.size());
  const auto value = text.substr(begin, text.find_last_not_of(" \t\n\r") + 1 - begin);
  for (const char* type : {"null", "boolean", "integer", "number", "object", "array"}) {
    if (std::ranges::find(types, type) == types.end()) continue;
    if (auto json = as_type(value, type); !json.empty()) return json;
  }
  return io::JsonText(text).text();
}

}  // namespace efla::serve
