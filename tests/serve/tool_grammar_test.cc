// Replies that must call tools: every one can be read as calls whose arguments follow the schemas.
#include "efla/serve/api/tool_grammar.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "efla/base/error.h"
#include "efla/serve/grammar/json_schema.h"
#include "efla/serve/grammar/reply_constraint.h"
#include "tests/serve/random_reply.h"
#include "tests/support/no_memory.h"

namespace efla::serve {
namespace {

using nlohmann::json;

constexpr const char* kWeather = R"({"type": "object", "properties": {
    "city": {"type": "string", "description": "a city"},
    "code": {"type": "string", "minLength": 2, "maxLength": 3},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "unit": {"enum": ["C", "F", "null"]},
    "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "place": {"$ref": "#/$defs/place"},
    "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["city", "days", "unit"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}})";

Tool tool_of(const std::string& name, const std::string& schema) {
  auto tool = make_tool(name, json::parse(schema));
  tool.schema = prepared_schema(schema, "parameters");
  return tool;
}

void check_weather(const json& arguments) {
  EXPECT_TRUE(arguments.at("city").is_string());
  EXPECT_TRUE(arguments.at("days").is_number_integer());
  EXPECT_GE(arguments["days"], 1);
  EXPECT_LE(arguments["days"], 14);
  EXPECT_TRUE(arguments.at("unit") == "C" || arguments["unit"] == "F" || arguments["unit"] == "null");
  const auto near = arguments.value("near", json());
  EXPECT_TRUE(near.is_string() || near.is_null());
  EXPECT_TRUE(!arguments.contains("place") || arguments["place"].at("x").is_number());
  const auto hours = arguments.value("hours", json::array());
  EXPECT_TRUE(hours.is_array() && hours.size() <= 3);
}

class ToolGrammarTest : public testing::TestWithParam<ToolFormat> {
 protected:
  void SetUp() override {
    if (!GrammarCompiler::unavailable().empty()) GTEST_SKIP() << GrammarCompiler::unavailable();
  }

  std::shared_ptr<const engine::Constraint> constraint(const ToolChoice& choice,
                                                       const std::optional<GrammarSource>& content = std::nullopt) {
    const auto result = test::compiled(compiler_, tool_grammar(tools_, GetParam(), choice, content, "arguments"));
    EXPECT_TRUE(result.grammar) << result.error;
    return make_constraint(tokens_, {.grammar = result.grammar, .ends = {test::kEnd}});
  }
  // Reads a reply as the server does.
  ReplyParser read(const std::string& text) {
    ReplyParser parser({.calls = GetParam(), .tools = tools_});
    parser.push(text);
    parser.finish(/*cut=*/false);
    return parser;
  }
  // Checks the calls of replies that random numbers choose. Returns the numbers of calls.
  std::multiset<std::size_t> check(const engine::Constraint& start, bool must_call) {
    std::multiset<std::size_t> calls;
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
      const auto text = test::draw(start, seed);
      if (!text) continue;
      SCOPED_TRACE(*text);
      const auto parser = read(*text);
      EXPECT_TRUE(!must_call || parser.content().empty());
      for (const auto& call : parser.calls()) {
        const auto arguments = json::parse(call.arguments);
        if (call.name == "weather") {
          check_weather(arguments);
        } else {
          EXPECT_EQ(call.name, "now");
          EXPECT_EQ(arguments, json::object());
        }
      }
      calls.insert(parser.calls().size());
    }
    EXPECT_GT(calls.size(), 20U);
    return calls;
  }

  std::vector<Tool> tools_{tool_of("weather", kWeather),
                           tool_of("now", R"({"type": "object", "properties": {}, "additionalProperties": false})")};
  std::unique_ptr<data::Tokenizer> tokenizer_ = data::load_tokenizer("bytes");
  GrammarCompiler compiler_{*tokenizer_};
  std::shared_ptr<const ReasoningTokens> tokens_ = std::make_shared<const ReasoningTokens>(*tokenizer_);
};

TEST_P(ToolGrammarTest, ForcedCallsCanBeRead) {
  const auto calls = check(*constraint({.must_call = true}), true);
  EXPECT_EQ(calls.count(0), 0U);
  EXPECT_EQ(calls.count(1) == calls.size(), GetParam() == ToolFormat::json) << "the others have several calls";
  const auto one = check(*constraint({.must_call = true, .one_call = true}), true);
  EXPECT_EQ(one.count(1), one.size());
  const auto named = constraint({.must_call = true, .name = "weather", .one_call = true});
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto text = test::draw(*named, seed);
    EXPECT_TRUE(!text || read(*text).calls().at(0).name == "weather") << *text;
  }
}

TEST_P(ToolGrammarTest, StrictCallsFollowTheirSchemasInAnyText) { check(*constraint({}), false); }

TEST_P(ToolGrammarTest, AReplyIsContentOfAFormOrCalls) {
  const auto start = constraint({.one_call = true}, choice_grammar({"yes", "no"}));
  const auto calls = check(*start, false);
  EXPECT_GT(calls.count(0), 5U);
  EXPECT_GT(calls.count(1), 5U);
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const auto text = test::draw(*start, seed);
    if (!text || !read(*text).calls().empty()) continue;
    EXPECT_TRUE(*text == "yes" || *text == "no") << *text;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, ToolGrammarTest,
                         testing::Values(ToolFormat::xml, ToolFormat::hermes, ToolFormat::json));

TEST(XmlArguments, RefusesWhatTextsCannotSay) {
  const auto refused = [](const std::string& property, const std::string& says) {
    SCOPED_TRACE(property);
    const std::vector<Tool> tools{tool_of("t", R"({"properties": {"p": )" + property + "}}")};
    try {
      tool_grammar(tools, ToolFormat::xml, {.must_call = true}, std::nullopt, "arguments");
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.got(), "\"p\" of t");
      EXPECT_NE(error.expected().find(says), std::string::npos) << error.what();
    }
  };
  refused(R"({"type": "string", "pattern": "a"})", "no pattern for calls in XML");
  refused(R"({"type": "string", "format": "date"})", "no format");
  refused(R"({"enum": ["a", 1]})", "constants that are all texts, or none");
  refused(R"({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]})", "no choice between a text and");
  refused(R"({"oneOf": [{"type": "string"}, {"type": "null"}]})", "anyOf instead of oneOf");
  refused(R"({"type": "object", "properties": {"a": {"$ref": "#"}}})", "a $ref to #/$defs/NAME");
  const std::vector<Tool> tools{
      tool_of("t", R"({"properties": {"p": {"oneOf": [{"type": "null"}, {"type": "null"}]}}})")};
  const auto source = tool_grammar(tools, ToolFormat::xml, {.must_call = true}, std::nullopt, "arguments");
  EXPECT_NE(source.text.find("oneOf"), std::string::npos) << "XGrammar refuses it, if the schemas overlap";
}

TEST(GrammarCompiler, SurvivesWithoutMemory) {
  if (!GrammarCompiler::unavailable().empty()) GTEST_SKIP() << GrammarCompiler::unavailable();
  const auto tokenizer = data::load_tokenizer("bytes");
  GrammarCompiler compiler(*tokenizer);
  std::int64_t failures = 0;
  for (bool failed = true; failed; ++failures) {
    auto ended = std::make_shared<std::promise<bool>>();
    auto has_grammar = ended->get_future();
    const auto source = choice_grammar({"a reply that no request has had before: " + std::to_string(failures)});
    const efla::test::OneFailure one(failures);
    compiler.compile(source, [ended = std::move(ended)](const GrammarCompiler::Result& result) {
      const std::vector<char> reply(100);  // which needs memory too
      ended->set_value(result.grammar != nullptr);
    });
    try {
      EXPECT_TRUE(has_grammar.get() || efla::test::OneFailure::happened()) << failures;
    } catch (const std::future_error&) {
      EXPECT_TRUE(efla::test::OneFailure::happened()) << failures;
    }
    failed = efla::test::OneFailure::happened();
  }
  EXPECT_GT(failures, 100);
}

// Each definition refers to the next one many times, so that the values without $ref are more than any memory has.
std::string nested_choices(const std::string& innermost) {
  json definitions = {{"d6", json::parse(innermost)}};
  for (int i = 0; i < 6; ++i) {
    const json next = {{"$ref", "#/$defs/d" + std::to_string(i + 1)}};
    definitions["d" + std::to_string(i)] = {{"anyOf", std::vector<json>(100, next)}};
  }
  const json schema = {{"type", "object"}, {"properties", {{"p", {{"$ref", "#/$defs/d0"}}}}}, {"$defs", definitions}};
  return schema.dump();
}

TEST(XmlArguments, TakesNoLongForChoicesOfChoices) {
  const auto grammar = [](const std::string& schema) {
    return tool_grammar(std::vector{tool_of("t", schema)}, ToolFormat::xml, {.must_call = true}, {}, "arguments");
  };
  const auto numbers = grammar(nested_choices(R"({"type": "integer"})"));
  EXPECT_NE(numbers.text.find("#/$defs/d0"), std::string::npos) << "JSON, which XGrammar reads once";
  EXPECT_THROW(grammar(nested_choices(R"({"type": "string"})")), Error);
  json large = {{"type", "object"}, {"properties", json::object()}, {"$defs", {{"d", {{"enum", {""}}}}}}};
  large["$defs"]["d"]["enum"][0] = std::string(100'000, 'a');
  for (int i = 0; i < 60; ++i) large["properties"]["p" + std::to_string(i)] = {{"type", "integer"}};
  EXPECT_THROW(grammar(large.dump()), Error);
}

}  // namespace
}  // namespace efla::serve
