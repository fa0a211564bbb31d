#include "efla/serve/grammar/json_schema.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "efla/base/error.h"
#include "efla/base/printable.h"
#include "efla/serve/grammar/expansion.h"

namespace efla::serve {
namespace {

using Json = nlohmann::ordered_json;  // replies have properties in the order of the schema
using Names = std::set<std::string, std::less<>>;

constexpr std::size_t kMostBytes = 256 << 10, kMostSchemas = 4096, kMostChoices = 4096, kMostOptional = 64,
                      kMostShaped = 256;
constexpr int kDeepest = 32, kDeepestValue = 256;
constexpr std::int64_t kMostRepeats = 10'000;  // of characters, elements and properties

// Keywords that say nothing about the text. OpenAPI's nullable allows null besides, which no reply needs.
const Names& annotations() {
  static const Names kNames{"title",         "description", "default",  "examples", "deprecated",
                            "readOnly",      "writeOnly",   "$comment", "$schema",  "$id",
                            "discriminator", "$anchor",     "nullable"};
  return kNames;
}

// Keywords by the type that they are for.
struct TypedKeywords {
  const char* type;
  Names names;
};

const std::vector<TypedKeywords>& typed_keywords() {
  static const std::vector<TypedKeywords> kKeywords{
      {"object", {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}},
      {"array", {"prefixItems", "items", "minItems", "maxItems"}},
      {"string", {"format", "pattern", "minLength", "maxLength"}},
      {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}},
  };
  return kKeywords;
}

const Names& formats() {
  static const Names kNames{"email", "date",     "time", "date-time", "duration",     "ipv4",
                            "ipv6",  "hostname", "uuid", "uri",       "uri-reference"};
  return kNames;
}

// Returns whether a $ref names a schema of the same text. Other values, such as constants, have keywords that nobody
// has checked.
bool names_schema(std::string_view ref) {
  static const Names kSchemas{"items", "additionalProperties"};
  static const Names kMaps{"$defs", "definitions", "properties", "prefixItems", "anyOf", "oneOf", "allOf"};
  if (!ref.starts_with('#') || ref.find('%') != std::string_view::npos) return false;
  ref.remove_prefix(1);
  bool in_map = false;
  while (ref.starts_with('/')) {
    const auto name = ref.substr(1, ref.find('/', 1) - 1);
    ref.remove_prefix(1 + name.size());
    if (!in_map && !kSchemas.contains(name) && !kMaps.contains(name)) return false;
    in_map = !in_map && kMaps.contains(name);
  }
  return ref.empty() && !in_map;
}

bool has_type(const Json& value, const std::string& type) {
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.is_boolean();
  if (type == "string") return value.is_string();
  if (type == "array") return value.is_array();
  if (type == "object") return value.is_object();
  if (type == "number") return value.is_number();
  if (type != "integer") return false;
  return value.is_number_integer() ||
         (value.is_number_float() && value.get<double>() == std::floor(value.get<double>()));
}

// Rewrites one schema with everything in it.
class Preparation {
 public:
  explicit Preparation(const std::string& argument) : argument_(argument) {}

  void prepare(Json& schema, const std::string& path, int depth) {
    if (schema.is_boolean()) return;
    if (!schema.is_object()) refuse(path, "a value that is no schema", "an object or a truth value");
    if (++schemas_ > kMostSchemas || depth > kDeepest) {
      throw Error("schema", argument_, "a schema that is too large",
                  "at most " + std::to_string(kMostSchemas) + " schemas, nested at most " + std::to_string(kDeepest) +
                      " levels deep");
    }
    remove_annotations(schema);
    for (const char* name : {"$defs", "definitions"}) prepare_map(schema, name, path, depth);
    for (const char* name : {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}) {
      if (!schema.contains(name)) continue;
      return prepare_single(schema, name, path, depth);
    }
    prepare_typed(schema, path, depth);
  }

 private:
  [[noreturn]] void refuse(const std::string& path, const std::string& got, const std::string& expected) const {
    throw Error("schema", argument_, got + " at " + printable(path, 200), expected);
  }
  [[noreturn]] void refuse_keyword(const std::string& path, const std::string& name) const {
    refuse(path, "the keyword " + printable(name, 100), "only keywords that a reply can be forced to follow");
  }

  static void remove_annotations(Json& schema) {
    std::vector<std::string> names;
    for (const auto& [name, value] : schema.items()) {
      if (annotations().contains(name) || name.starts_with("x-")) names.push_back(name);
    }
    for (const auto& name : names) schema.erase(name);
  }

  // Refuses keywords but the allowed ones.
  void require_keywords(const Json& schema, const std::string& path, const Names& allowed) const {
    for (const auto& [name, value] : schema.items()) {
      if (allowed.contains(name) || name == "$defs" || name == "definitions") continue;
      refuse_keyword(path, name);
    }
  }

  void prepare_map(Json& schema, const char* name, const std::string& path, int depth) {
    if (!schema.contains(name)) return;
    auto& map = schema[name];
    if (!map.is_object()) refuse(path, std::string(name) + " that is no object", "an object of schemas");
    for (auto& [key, value] : map.items()) prepare(value, path + "/" + name + "/" + key, depth + 1);
  }

  // Prepares a schema whose keyword `name` alone says what the text is, beside a type of constants.
  void prepare_single(Json& schema, const std::string& name, const std::string& path, int depth) {
    const bool constants = name == "const" || name == "enum";
    require_keywords(schema, path, constants ? Names{name, "type"} : Names{name});
    auto& value = schema[name];
    if (name == "$ref") {
      if (!value.is_string() || !names_schema(value.get<std::string>())) {
        refuse(path, "another $ref", "\"#\" or \"#/…\" that names a schema, without %");
      }
    } else if (constants) {
      prepare_constants(schema, name, path);
    } else {
      if (!value.is_array() || value.empty()) refuse(path, name + " without schemas", "a list of schemas");
      if (name == "allOf" && value.size() > 1) refuse(path, "allOf with several schemas", "one schema");
      for (std::size_t i = 0; i < value.size(); ++i) {
        prepare(value[i], path + "/" + name + "/" + std::to_string(i), depth + 1);
      }
    }
  }

  // Keeps the constants that have the schema's type.
  void prepare_constants(Json& schema, const std::string& name, const std::string& path) {
    Json values = name == "const" ? Json::array({schema[name]}) : schema[name];
    if (!values.is_array() || values.empty()) refuse(path, "enum without values", "a list of values");
    choices_ += values.size();
    if (choices_ > kMostChoices) {
      throw Error("schema", argument_, "too many values of enum", "at most " + std::to_string(kMostChoices));
    }
    if (schema.contains("type")) {
      const auto types = types_of(schema, path);
      Json kept = Json::array();
      for (const auto& value : values) {
        if (std::ranges::any_of(types, [&](const auto& type) { return has_type(value, type); })) kept.push_back(value);
      }
      if (kept.empty()) refuse(path, "no value of the type in " + name, "at least one");
      values = kept;
    }
    schema.erase("type");
    schema.erase(name);
    schema["enum"] = values;
  }

  std::vector<std::string> types_of(const Json& schema, const std::string& path) const {
    std::vector<std::string> types;
    const auto add = [&](const Json& type) {
      for (const char* known : {"object", "array", "string", "number", "integer", "boolean", "null"}) {
        if (type != known) continue;
        if (std::ranges::find(types, known) == types.end()) types.emplace_back(known);
        return;
      }
      refuse(path, "a type that is none", "object, array, string, number, integer, boolean or null");
    };
    const auto& type = schema.at("type");
    if (type.is_array() && !type.empty()) {
      std::for_each(type.begin(), type.end(), add);
    } else {
      add(type);
    }
    return types;
  }

  void prepare_typed(Json& schema, const std::string& path, int depth) {
    Names allowed{"type"};
    std::vector<std::string> described;  // types that keywords are for
    for (const auto& [type, names] : typed_keywords()) {
      allowed.insert(names.begin(), names.end());
      const bool has = std::ranges::any_of(names, [&](const auto& name) { return schema.contains(name); });
      if (has) described.emplace_back(type);
    }
    require_keywords(schema, path, allowed);
    if (!schema.contains("type")) {
      if (described.empty()) return;
      if (described.size() > 1) refuse(path, "keywords of several types without type", "a type");
      schema["type"] = described.front();
    }
    const auto types = types_of(schema, path);
    schema["type"] = types.size() == 1 ? Json(types.front()) : Json(types);
    const auto has = [&](std::string_view type) { return std::ranges::find(types, type) != types.end(); };
    for (const auto& [type, names] : typed_keywords()) {  // others say nothing
      if (has(type) || (type == std::string_view("number") && has("integer"))) continue;
      for (const auto& name : names) schema.erase(name);
    }
    if (has("object")) prepare_object(schema, path, depth);
    if (has("array")) prepare_array(schema, path, depth);
    if (has("string")) prepare_string(schema, path);
  }

  std::int64_t count(const Json& schema, const char* name, const std::string& path, std::int64_t otherwise) const {
    if (!schema.contains(name)) return otherwise;
    const auto& value = schema.at(name);
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() <= kMostRepeats;
    if (!fits)
      refuse(path, std::string(name) + " " + printable(value.dump(), 40),
             "a whole number from 0 to " + std::to_string(kMostRepeats));
    return value.get<std::int64_t>();
  }

  void prepare_object(Json& schema, const std::string& path, int depth) {
    prepare_map(schema, "properties", path, depth);
    const bool has_properties = schema.contains("properties") && !schema["properties"].empty();
    if (!schema.contains("additionalProperties")) schema["additionalProperties"] = !has_properties;
    auto& others = schema["additionalProperties"];
    prepare(others, path + "/additionalProperties", depth + 1);
    if (schema.contains("required")) require_properties(schema, path);
    const auto least = count(schema, "minProperties", path, 0),
               most = count(schema, "maxProperties", path, kMostRepeats);
    require_few(schema, path);
    if (schema["additionalProperties"] != false && schema.contains("properties")) {
      for (const auto& [name, value] : schema["properties"].items()) require_plain(name, path);
    }
    if (least > 1 && schema["additionalProperties"] != false) {
      refuse(path, "minProperties with properties of any name", "\"additionalProperties\": false");
    }
    if (least > most) refuse(path, "minProperties above maxProperties", "an object that is possible");
  }

  // Limits what the masks of an object cost.
  void require_few(const Json& schema, const std::string& path) const {
    if (!schema.contains("properties")) return;
    const auto size = schema["properties"].size();
    std::set<std::string> required;
    if (schema.contains("required")) {
      for (const auto& name : schema["required"]) required.insert(name.get<std::string>());
    }
    const auto optional = schema["additionalProperties"] == false ? size - std::min(size, required.size()) : size;
    if (optional <= kMostOptional) return;
    refuse(path, std::to_string(optional) + " properties that may be missing or have others beside them",
           "at most " + std::to_string(kMostOptional) + ", the others required");
  }

  // Requires that a name has one spelling in JSON, so that further properties can have other names.
  void require_plain(const std::string& name, const std::string& path) const {
    const auto is_plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
    if (std::ranges::all_of(name, is_plain)) return;
    refuse(path, "the property " + printable(Json(name).dump(), 100) + " with additionalProperties",
           "printable ASCII without \" and \\, or \"additionalProperties\": false");
  }

  // Requires that each required property is described.
  void require_properties(Json& schema, const std::string& path) const {
    const auto& required = schema["required"];
    if (!required.is_array()) refuse(path, "required that is no list", "a list of names");
    for (const auto& name : required) {
      if (!name.is_string()) refuse(path, "required with a value that is no name", "a list of names");
      if (schema.contains("properties") && schema["properties"].contains(name.get<std::string>())) continue;
      if (schema["additionalProperties"] == false) {
        refuse(path, "required with " + printable(name.dump(), 100), "names that properties has");
      }
      schema["properties"][name.get<std::string>()] = schema["additionalProperties"];
    }
  }

  void prepare_array(Json& schema, const std::string& path, int depth) {
    if (!schema.contains("items")) schema["items"] = Json::object();
    if (schema["items"] == true) schema["items"] = Json::object();
    prepare(schema["items"], path + "/items", depth + 1);
    if (schema.contains("prefixItems")) {
      auto& items = schema["prefixItems"];
      if (!items.is_array()) refuse(path, "prefixItems that is no list", "a list of schemas");
      for (std::size_t i = 0; i < items.size(); ++i) {
        if (items[i] == true) items[i] = Json::object();
        prepare(items[i], path + "/prefixItems/" + std::to_string(i), depth + 1);
      }
    }
    const auto least = count(schema, "minItems", path, 0), most = count(schema, "maxItems", path, kMostRepeats);
    if (least > most) refuse(path, "minItems above maxItems", "a list that is possible");
  }

  // Limits the texts with a form of their own, because each takes as long to compile as all others together.
  void prepare_string(Json& schema, const std::string& path) {
    const auto has = [&](const char* name) { return schema.contains(name); };
    if ((has("minLength") || has("maxLength") || has("pattern") || has("format")) && ++shaped_ > kMostShaped) {
      refuse(path, "one more text with a length, pattern or format", "at most " + std::to_string(kMostShaped));
    }
    count(schema, "minLength", path, 0);
    count(schema, "maxLength", path, 0);
    if (schema.contains("pattern") && !schema["pattern"].is_string())
      refuse(path, "pattern that is no text", "a regular expression");
    if (schema.contains("pattern")) expanded_ += expanded_size(schema["pattern"].get<std::string>());
    if (expanded_ > kMostExpanded) {
      refuse(path, "a pattern that is too long with its repetitions",
             "at most " + std::to_string(kMostExpanded) + " characters in all patterns");
    }
    if (!schema.contains("format")) return;
    const auto& format = schema["format"];
    if (format.is_string() && formats().contains(format.get<std::string>())) return;
    std::string expected;
    for (const auto& name : formats()) expected += (expected.empty() ? "" : ", ") + name;
    refuse(path, "format " + printable(format.dump(), 100), "one of " + expected);
  }

  const std::string& argument_;
  std::int64_t expanded_ = 0;  // characters of patterns
  std::size_t schemas_ = 0, choices_ = 0, shaped_ = 0;
};

}  // namespace

std::string prepared_schema(std::string_view json, const std::string& argument) {
  if (json.size() > kMostBytes) {
    throw Error("schema", argument, "a schema of " + std::to_string(json.size()) + " bytes",
                "at most " + std::to_string(kMostBytes));
  }
  const auto require_flat = [&](int depth, Json::parse_event_t /*event*/, const Json& /*value*/) {
    if (depth <= kDeepestValue) return true;
    throw Error("schema", argument, "a value that is nested too deeply",
                "at most " + std::to_string(kDeepestValue) + " levels");
  };
  auto schema = Json::parse(json, require_flat, /*allow_exceptions=*/false);
  if (schema.is_discarded()) throw Error("schema", argument, "a text that is no JSON", "a JSON schema");
  Preparation(argument).prepare(schema, "#", 0);
  return schema.dump();
}

}  // namespace efla::serve
