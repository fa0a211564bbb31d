#include "efla/serve/api/xml_arguments.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "efla/base/error.h"
#include "efla/base/printable.h"

namespace efla::serve {
namespace {

using io::JsonText;
using Json = nlohmann::ordered_json;

constexpr const char *kEnd = "</parameter>", *kLineEnd = "\n</parameter>\n";

// Any text that a parameter may be.
JsonText any_text() {
  JsonText excludes = JsonText::array();
  excludes.push_back(kEnd);
  return {{"type", "any_text"}, {"excludes", excludes}};
}

// The formats of one tool's parameters.
class Parameters {
 public:
  Parameters(const Tool& tool, Json schema) : tool_(tool), schema_(std::move(schema)) {}

  JsonText all() {
    const bool object = schema_.is_object() && schema_.value("type", Json()) == "object";
    if (!object) refuse("arguments", "a schema of the type object");
    for (const char* name : {"minProperties", "maxProperties"}) {
      if (schema_.contains(name)) refuse(name, "none");
    }
    JsonText elements = JsonText::array();
    const auto properties = schema_.value("properties", Json::object());
    for (const auto& [name, schema] : properties.items()) {
      if (name.find_first_of("<>\n") != std::string::npos) refuse(name, "a name without <, > and line breaks");
      const JsonText tag{{"type", "tag"},
                         {"begin", "<parameter=" + name + ">\n"},
                         {"content", value(name, schema, 0)},
                         {"end", kLineEnd}};
      elements.push_back(is_required(name) ? tag : JsonText{{"type", "optional"}, {"content", tag}});
    }
    if (elements.is_empty()) return {{"type", "const_string"}, {"value", ""}};
    return {{"type", "sequence"}, {"elements", elements}};
  }

 private:
  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const {
    throw Error("serve", "tools", "\"" + printable(name, 100) + "\" of " + printable(tool_.name, 100),
                expected + " for calls in XML");
  }

  bool is_required(const std::string& name) const {
    const auto required = schema_.value("required", Json::array());
    return std::ranges::find(required, Json(name)) != required.end();
  }

  // Returns the format of a value that follows a schema.
  JsonText value(const std::string& name, const Json& schema, int depth) {
    constexpr int kDeepest = 16, kMostValues = 1024;
    if (depth > kDeepest) refuse(name, "a schema that is nested less deeply");
    if (++values_ > kMostValues)
      refuse(name, "at most " + std::to_string(kMostValues) + " values, counting each $ref,");
    if (schema.is_boolean() || schema.empty()) return any_text();
    if (schema.contains("$ref")) {
      const auto* described = referenced(schema.at("$ref").get<std::string>());
      if (described == nullptr) refuse(name, "a $ref to #/$defs/NAME");
      return has_text(*described) ? value(name, *described, depth + 1) : json(name, schema);
    }
    if (schema.contains("enum")) return constants(name, schema.at("enum"));
    for (const char* several : {"anyOf", "oneOf", "allOf"}) {
      if (!schema.contains(several)) continue;
      if (!has_text(schema)) return json(name, schema);
      const auto& schemas = schema.at(several);
      if (several == std::string_view("oneOf") && schemas.size() > 1)
        refuse(name, "anyOf instead of oneOf with a text");
      return union_of(name, schemas, depth);
    }
    const auto type = schema.value("type", Json());
    if (!type.is_array())
      return type == "string" ? text(name, schema) : type.is_null() ? any_text() : json(name, schema);
    Json each = Json::array();
    for (const auto& one : type) {
      const bool plain = one == "null" || one == "boolean";
      each.push_back(plain ? Json::object() : schema);
      each.back()["type"] = one;
    }
    return union_of(name, each, depth);
  }

  const Json* referenced(const std::string& uri) const {
    for (const char* map : {"$defs", "definitions"}) {
      const auto prefix = "#/" + std::string(map) + "/";
      if (!uri.starts_with(prefix) || !schema_.contains(map)) continue;
      const auto found = schema_.at(map).find(uri.substr(prefix.size()));
      if (found != schema_.at(map).end()) return &*found;
    }
    return nullptr;
  }

  bool has_text(const Json& schema) const {
    std::set<const Json*> seen;
    return has_text(schema, seen);
  }

  // Returns whether a value of a schema may be a text. seen: the schemas that a $ref has named before.
  bool has_text(const Json& schema, std::set<const Json*>& seen) const {
    if (schema.is_boolean() || schema.empty()) return true;
    if (schema.contains("$ref")) {
      const auto* described = referenced(schema.at("$ref").get<std::string>());
      return described == nullptr || (seen.insert(described).second && has_text(*described, seen));
    }
    if (schema.contains("enum"))
      return std::ranges::any_of(schema.at("enum"), [](const auto& one) { return one.is_string(); });
    for (const char* several : {"anyOf", "oneOf", "allOf"}) {
      if (!schema.contains(several)) continue;
      return std::ranges::any_of(schema.at(several), [&](const auto& one) { return has_text(one, seen); });
    }
    const auto type = schema.value("type", Json());
    return type.is_null() || type == "string" ||
           (type.is_array() && std::ranges::find(type, Json("string")) != type.end());
  }

  // Requires that each $ref of a value names a schema that the value has too.
  void require_definitions(const std::string& name, std::string_view text) const {
    constexpr std::string_view kRef = "\"$ref\":\"";
    for (auto at = text.find(kRef); at != std::string_view::npos; at = text.find(kRef, at + 1)) {
      const auto uri = text.substr(at + kRef.size());
      if (!uri.starts_with("#/$defs/") && !uri.starts_with("#/definitions/")) refuse(name, "a $ref to #/$defs/NAME");
    }
  }

  JsonText json(const std::string& name, const Json& schema) {
    constexpr std::size_t kMostBytes = 1 << 20;
    Json whole = schema;
    for (const char* map : {"$defs", "definitions"}) {
      if (schema_.contains(map)) whole[map] = schema_.at(map);
    }
    const auto text = whole.dump();
    bytes_ += text.size();
    if (bytes_ > kMostBytes) {
      refuse(name, "values of at most " + std::to_string(kMostBytes) + " bytes, each with $defs,");
    }
    require_definitions(name, text);
    return json_value(text);
  }

  // Texts stand as they are. A text beside other constants could be read as one of them.
  JsonText constants(const std::string& name, const Json& values) {
    const auto texts = std::ranges::count_if(values, [](const auto& one) { return one.is_string(); });
    if (texts == 0) return json(name, {{"enum", values}});
    JsonText each = JsonText::array();
    for (const auto& one : values) {
      const bool known = one.is_string() || (one.is_null() && std::ranges::find(values, Json("null")) == values.end());
      if (!known) refuse(name, "constants that are all texts, or none");
      const auto written = one.is_string() ? one.get<std::string>() : "null";
      if (written.find(kEnd) != std::string::npos) refuse(name, "constants without </parameter>");
      each.push_back({{"type", "const_string"}, {"value", written}});
    }
    return {{"type", "or"}, {"elements", each}};
  }

  // A text may be read as a value of another type. This type therefore has no keywords.
  JsonText union_of(const std::string& name, const Json& schemas, int depth) {
    JsonText each = JsonText::array();
    bool texts = false, keywords = false;
    for (const auto& one : schemas) {
      const bool text = has_text(one);
      texts = texts || text;
      keywords = keywords || (!text && !(one.size() == 1 && one.contains("type")));
      each.push_back(value(name, one, depth + 1));
    }
    if (texts && keywords) refuse(name, "no choice between a text and a value with keywords");
    return {{"type", "or"}, {"elements", each}};
  }

  JsonText text(const std::string& name, const Json& schema) const {
    for (const char* keyword : {"pattern", "format"}) {
      if (schema.contains(keyword)) refuse(name, std::string("no ") + keyword);
    }
    if (!schema.contains("minLength") && !schema.contains("maxLength")) return any_text();
    const JsonText character{{"type", "regex"}, {"pattern", "[^<]"}};
    return {{"type", "repeat"},
            {"min", schema.value("minLength", 0)},
            {"max", schema.value("maxLength", -1)},
            {"content", character}};
  }

  const Tool& tool_;
  const Json schema_;
  int values_ = 0;
  std::size_t bytes_ = 0;  // of values as JSON, each with $defs
};

}  // namespace

JsonText json_value(const std::string& schema) {
  constexpr int kMostBlanks = 32;  // in a row
  return {{"type", "json_schema"}, {"json_schema", JsonText::json(schema)}, {"max_whitespace_cnt", kMostBlanks}};
}

JsonText xml_arguments(const Tool& tool) {
  if (!tool.schema.empty()) return Parameters(tool, Json::parse(tool.schema)).all();
  const JsonText parameter{{"type", "tag"}, {"begin", "<parameter="}, {"content", any_text()}, {"end", kLineEnd}};
  return {{"type", "star"}, {"content", parameter}};
}

}  // namespace efla::serve
