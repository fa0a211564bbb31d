#include "efla/serve/api/tool_grammar.h"

#include <algorithm>
#include <utility>

#include "efla/io/json_text.h"
#include "efla/serve/api/xml_arguments.h"

namespace efla::serve {
namespace {

using io::JsonText;

JsonText list_of(std::initializer_list<JsonText> values) {
  JsonText list = JsonText::array();
  for (const auto& value : values) list.push_back(value);
  return list;
}

JsonText expression(std::string_view pattern) { return {{"type", "regex"}, {"pattern", pattern}}; }

// Returns the format of a call of a tool, as XGrammar's structural tags have it.
JsonText call_tag(const Tool& tool, ToolFormat format, std::string_view arguments) {
  const auto name = JsonText(tool.name).text();
  const auto schema = tool.schema.empty() ? std::string(R"({"type":"object"})") : tool.schema;
  const std::string head = "{\"name\": " + name + ", \"" + std::string(arguments) + "\": ";
  switch (format) {
    case ToolFormat::xml:
      return {{"type", "tag"},
              {"begin", "<tool_call>\n<function=" + tool.name + ">\n"},
              {"content", xml_arguments(tool)},
              {"end", "</function>\n</tool_call>"}};
    case ToolFormat::hermes:
      return {{"type", "tag"},
              {"begin", "<tool_call>\n" + head},
              {"content", json_value(schema)},
              {"end", "}\n</tool_call>"}};
    case ToolFormat::json:
    case ToolFormat::none:
      break;
  }
  return {{"type", "tag"}, {"begin", head}, {"content", json_value(schema)}, {"end", "}"}};
}

JsonText content_format(const GrammarSource& source) {
  switch (source.kind) {
    case GrammarSource::Kind::schema:
      return json_value(source.text);
    case GrammarSource::Kind::regex:
      return expression(source.text);
    case GrammarSource::Kind::ebnf:
    case GrammarSource::Kind::tags:
      break;
  }
  return {{"type", "grammar"}, {"grammar", source.text}};
}

}  // namespace

GrammarSource tool_grammar(std::span<const Tool> tools, ToolFormat format, const ToolChoice& choice,
                           const std::optional<GrammarSource>& content, std::string_view arguments) {
  JsonText tags = JsonText::array();
  for (const auto& tool : tools) {
    if (choice.name.empty() || tool.name == choice.name) tags.push_back(call_tag(tool, format, arguments));
  }
  const bool bare = format == ToolFormat::json;
  const JsonText calls{{"type", "tags_with_separator"},
                       {"tags", tags},
                       {"separator", "\n"},
                       {"at_least_one", true},
                       {"stop_after_first", bare || choice.one_call}};
  JsonText whole = calls;
  if (!choice.must_call && content) {
    whole = {{"type", "or"}, {"elements", list_of({content_format(*content), calls})}};
  } else if (!choice.must_call && bare) {
    whole = {{"type", "or"}, {"elements", list_of({expression("([^{\\[ \\n\\r\\t][\\s\\S]*)?"), calls})}};
  } else if (!choice.must_call) {
    JsonText excludes = JsonText::array();
    if (format == ToolFormat::xml) excludes.push_back("<function=");
    whole = {{"type", "triggered_tags"},
             {"triggers", list_of({"<tool_call>"})},
             {"tags", tags},
             {"excludes", excludes},
             {"stop_after_first", choice.one_call}};
  }
  const JsonText tag{{"type", "structural_tag"}, {"format", whole}};
  return {.kind = GrammarSource::Kind::tags, .text = tag.text()};
}

}  // namespace efla::serve
