#include "efla/io/toml.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include "efla/io/content_error.h"
#include "efla/io/file.h"

namespace efla::io {
namespace {

using nlohmann::json;

struct Source {
  std::string_view text;
  const std::string& name;

  // Lines and columns count from 1; a column is a character, not a byte.
  [[noreturn]] void refuse(const toml::source_position& at, std::string_view why) const {
    std::size_t offset = 0;
    for (toml::source_index line = 1; line < at.line; ++line) offset = text.find('\n', offset) + 1;
    const auto is_inside = [&](std::size_t byte) { return byte < text.size() && (text[byte] & 0xc0) == 0x80; };
    for (toml::source_index column = 1; column < at.column && offset < text.size(); ++column) {
      do ++offset;
      while (is_inside(offset));
    }
    fail_at(name, offset, fmt::format("line {}, column {}: {}", at.line, at.column, why));
  }
};

json to_json(const toml::node& node, const Source& source) {
  if (const auto* table = node.as_table()) {
    json object = json::object();
    for (const auto& [key, value] : *table) object[std::string(key.str())] = to_json(value, source);
    return object;
  }
  if (const auto* array = node.as_array()) {
    json list = json::array();
    for (const auto& value : *array) list.push_back(to_json(value, source));
    return list;
  }
  if (const auto* value = node.as_string()) return value->get();
  if (const auto* value = node.as_integer()) return value->get();
  if (const auto* value = node.as_floating_point()) return value->get();
  if (const auto* value = node.as_boolean()) return value->get();
  source.refuse(node.source().begin, "a date or time, expected a string, number, truth value, array or table");
}

}  // namespace

json parse_toml(std::string_view text, const std::string& name) {
  const Source source{text, name};
  try {
    return to_json(toml::parse(text), source);
  } catch (const toml::parse_error& error) {
    source.refuse(error.source().begin, error.description());
  }
}

json read_toml(const std::filesystem::path& path) {
  const Bytes text = read_file(path);
  return parse_toml({reinterpret_cast<const char*>(text.data()), text.size()}, path.string());
}

}  // namespace efla::io
