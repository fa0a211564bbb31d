// The fields that say what a reply must be.
#include <algorithm>
#include <utility>

#include "efla/serve/api/defaults.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/request_fields.h"
#include "efla/serve/chat/json_slices.h"
#include "efla/serve/grammar/json_schema.h"

namespace efla::serve {
namespace {

using io::Fields;

constexpr std::size_t kMostGrammarBytes = 64 << 10, kMostChoices = 1024;

// Gives the replies a grammar, which `field` describes.
void set_grammar(const Fields& fields, const std::string& field, GrammarSource source, GenerationRequest& request) {
  if (request.grammar) fields.refuse(field, "none beside " + request.grammar_field);
  request.grammar = std::move(source);
  request.grammar_field = field;
}

// Reads the schema of a field. text: of the object around it.
GrammarSource schema_of(const Fields& fields, const char* name, std::string_view text) {
  const auto* schema = fields.find(name);
  if (schema == nullptr || !(schema->is_object() || schema->is_boolean())) fields.refuse(name, "a JSON schema");
  return {.kind = GrammarSource::Kind::schema,
          .text = fields.check([&] { return prepared_schema(json_member(text, name), name); })};
}

// Reads {"type": "json_schema", …}. inner: the object that has the schema, in chats a member of the format. Returns
// nothing for a text of no particular form.
std::optional<GrammarSource> read_format(const Fields& format, std::string_view text, bool nested) {
  const auto type = format.get<std::string>("type");
  std::optional<GrammarSource> source;
  if (type == "json_object") {
    source = GrammarSource{.text = R"({"type":"object"})"};
  } else if (type == "json_schema") {
    const auto read = [&](const Fields& fields, std::string_view written) {
      for (const char* ignored : {"name", "description"}) fields.find<std::string>(ignored);
      fields.find<bool>("strict");  // every reply follows the schema
      source = schema_of(fields, "schema", written);
      refuse_others(fields);
    };
    nested ? read(format.object("json_schema"), json_member(text, "json_schema")) : read(format, text);
  } else if (type != "text") {
    format.refuse("type", "text, json_object or json_schema");
  }
  refuse_others(format);
  return source;
}

// Returns a text of a limited length.
std::string read_limited(const Fields& fields, const char* name) {
  auto text = fields.get<std::string>(name);
  if (text.empty() || text.size() > kMostGrammarBytes) {
    fields.refuse(name, "1 to " + std::to_string(kMostGrammarBytes) + " bytes");
  }
  return text;
}

GrammarSource read_choice(const Fields& fields) {
  const auto texts = fields.get<std::vector<std::string>>("choice");
  std::size_t bytes = 0;
  for (const auto& text : texts) bytes += text.size();
  const bool fits = !texts.empty() && texts.size() <= kMostChoices && bytes <= kMostGrammarBytes;
  if (!fits) {
    fields.refuse("choice", "1 to " + std::to_string(kMostChoices) + " texts with at most " +
                                std::to_string(kMostGrammarBytes) + " bytes together");
  }
  return choice_grammar(texts);
}

// Reads vLLM's structured_outputs.
void read_structured_outputs(const Fields& fields, std::string_view text, GenerationRequest& request) {
  const std::string field = "structured_outputs";
  if (fields.find(field) == nullptr) return;
  const auto outputs = fields.object(field);
  const auto set = [&](const char* name, GrammarSource source) {
    if (request.grammar) outputs.refuse(name, "none beside " + request.grammar_field);
    request.grammar = std::move(source);
    request.grammar_field = field + "." + name;
  };
  if (const auto* schema = outputs.find("json")) {
    if (!schema->is_string()) {
      set("json", schema_of(outputs, "json", json_member(text, field)));
    } else {
      set("json", {.text = outputs.check([&] { return prepared_schema(schema->get<std::string>(), "json"); })});
    }
  }
  if (outputs.find<bool>("json_object").value_or(false)) set("json_object", {.text = R"({"type":"object"})"});
  if (outputs.find("regex") != nullptr) {
    set("regex", {.kind = GrammarSource::Kind::regex, .text = read_limited(outputs, "regex")});
  }
  if (outputs.find("choice") != nullptr) set("choice", read_choice(outputs));
  if (outputs.find("grammar") != nullptr) {
    set("grammar", {.kind = GrammarSource::Kind::ebnf, .text = read_limited(outputs, "grammar")});
  }
  refuse_others(outputs);
  if (!request.grammar) fields.refuse(field, "json, json_object, regex, choice or grammar");
}

}  // namespace

void read_strict(const Fields& fields, std::string_view written, const char* name, Tool& tool,
                 GenerationRequest& request) {
  const bool strict = fields.find<bool>("strict").value_or(false);
  const bool called = request.must_call && (request.called.empty() || request.called == tool.name);
  if (!strict && !called) return;
  request.strict_calls = true;
  const auto schema = json_member(written, name);
  tool.schema = fields.check([&] {
    return prepared_schema(
        schema.empty() || schema == "null" ? R"({"type": "object", "additionalProperties": false})" : schema, name);
  });
}

void require_called(const GenerationRequest& request) {
  if (!request.must_call) return;
  const auto is_called = [&](const Tool& tool) { return request.called.empty() || request.called == tool.name; };
  if (std::ranges::any_of(request.tools, is_called)) return;
  throw ApiError(400,
                 "tool_choice: got " + (request.called.empty() ? "a call of a tool" : io::brief(request.called)) +
                     ", expected a tool that tools has",
                 "tool_choice");
}

void read_structured_output(const Fields& fields, std::string_view text, GenerationRequest& request) {
  if (fields.find("response_format") != nullptr) {
    const auto source =
        read_format(fields.object("response_format"), json_member(text, "response_format"), /*nested=*/true);
    if (source) set_grammar(fields, "response_format", *source, request);
  }
  if (fields.find("text") != nullptr) {
    const auto options = fields.object("text");
    const auto written = json_member(text, "text");
    if (options.find("format") != nullptr) {
      const auto source = read_format(options.object("format"), json_member(written, "format"), /*nested=*/false);
      if (source) set_grammar(fields, "text", *source, request);
      request.response_text = written;
    }
    accept_defaults(options, Place::text);
    refuse_others(options);
  }
  read_structured_outputs(fields, text, request);
}

void read_output_config(const Fields& fields, std::string_view text, GenerationRequest& request) {
  if (fields.find("output_config") == nullptr) return;
  const auto config = fields.object("output_config");
  if (config.find("format") != nullptr) {
    const auto written = json_member(json_member(text, "output_config"), "format");
    const auto source = read_format(config.object("format"), written, /*nested=*/false);
    if (source) set_grammar(fields, "output_config", *source, request);
  }
  accept_defaults(config, Place::anthropic_output);
  refuse_others(config);
}

}  // namespace efla::serve
