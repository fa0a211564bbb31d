#include "efla/serve/chat/tool.h"

#include <algorithm>
#include <utility>

#include "efla/io/json_text.h"
#include "efla/serve/chat/json_slices.h"

namespace efla::serve {
namespace {

using nlohmann::json;

// Returns the schema that {"$ref": "#/…"} stands for; null for another place.
const json* referenced(const json& root, const std::string& uri) {
  if (!uri.starts_with("#/")) return nullptr;
  try {
    return &root.at(json::json_pointer(uri.substr(1)));
  } catch (const json::exception&) {
    return nullptr;
  }
}

// The types that the parameters of one tool may have. Checks no schema, because the model sees it as it is, and looks
// at a part of one that is too large, because a few schemas that refer to each other can stand for very many.
class ParameterTypes {
 public:
  explicit ParameterTypes(const json& root) : root_(root) {}

  // Adds the types that a schema names, also in its constants, anyOf, oneOf, allOf and $ref.
  void add(const json& schema, std::vector<std::string>& types, int depth = 0) {
    constexpr int kDeepest = 8;
    if (!schema.is_object() || depth > kDeepest || !take(1)) return;
    if (const auto ref = schema.find("$ref"); ref != schema.end() && ref->is_string()) {
      const auto& uri = ref->get_ref<const std::string&>();
      const auto* described = take(uri.size()) ? referenced(root_, uri) : nullptr;
      if (described != nullptr) add(*described, types, depth + 1);
    }
    if (const auto value = schema.find("const"); value != schema.end()) add_constant(*value, types);
    for_each(schema, "enum", [&](const json& value) { add_constant(value, types); });
    for_each(schema, "type", [&](const json& type) { add_type(type, types); });
    if (const auto type = schema.find("type"); type != schema.end()) add_type(*type, types);
    for (const char* choice : {"anyOf", "oneOf", "allOf"}) {
      for_each(schema, choice, [&](const json& one) { add(one, types, depth + 1); });
    }
  }

 private:
  // Returns whether so many values and characters may still be looked at.
  bool take(std::size_t count) {
    const bool enough = count <= left_;
    left_ -= enough ? count : left_;
    return enough;
  }

  template <class F>
  void for_each(const json& schema, const char* name, const F& f) {
    const auto list = schema.find(name);
    if (list == schema.end() || !list->is_array()) return;
    for (const auto& one : *list) {
      if (!take(1)) return;
      f(one);
    }
  }

  static void add_type(const json& type, std::vector<std::string>& types) {
    for (const char* known : {"null", "boolean", "integer", "number", "object", "array", "string"}) {
      if (type == known && std::ranges::find(types, known) == types.end()) types.emplace_back(known);
    }
  }
  static void add_constant(const json& value, std::vector<std::string>& types) {
    add_type(value.is_number_integer() ? "integer" : value.type_name(), types);
  }

  const json& root_;
  std::size_t left_ = 100'000;
};

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
  ParameterTypes types(schema);
  for (const auto& [parameter, described] : properties.items()) types.add(described, tool.types[parameter]);
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
