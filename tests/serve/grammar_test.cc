// Grammars, and what they leave of the logits.
#include "efla/serve/grammar/grammar.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "efla/base/error.h"
#include "efla/serve/grammar/expansion.h"
#include "efla/serve/grammar/json_schema.h"
#include "efla/serve/grammar/reply_constraint.h"
#include "tests/serve/random_reply.h"

namespace efla::serve {
namespace {

using nlohmann::json;

using test::allowed;
using test::draw;
using test::kEnd;

class GrammarTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!GrammarCompiler::unavailable().empty()) GTEST_SKIP() << GrammarCompiler::unavailable();
  }

  GrammarCompiler::Result compile(GrammarSource source) { return test::compiled(compiler_, std::move(source)); }
  GrammarCompiler::Result compile_schema(const std::string& schema) {
    return compile({.text = prepared_schema(schema, "schema")});
  }
  std::shared_ptr<const engine::Constraint> constraint(ReplyRule rule) {
    rule.ends = {kEnd};
    return make_constraint(tokens_, std::move(rule));
  }

  static std::string text_of(const std::set<std::int32_t>& ids) {
    std::string text;
    for (const auto id : ids) text += id == kEnd ? '$' : static_cast<char>(id);
    return text;
  }
  static void take(engine::Constraint& constraint, const std::string& text) {
    for (const char c : text) {
      const auto id = static_cast<std::int32_t>(static_cast<unsigned char>(c));
      ASSERT_TRUE(allowed(constraint).contains(id)) << text << " at " << c;
      constraint.take(id);
    }
  }
  std::unique_ptr<data::Tokenizer> tokenizer_ = data::load_tokenizer("bytes");
  GrammarCompiler compiler_{*tokenizer_};
  std::shared_ptr<const ReasoningTokens> tokens_ = std::make_shared<const ReasoningTokens>(*tokenizer_);
};

TEST_F(GrammarTest, RepliesFollowASchema) {
  const auto compiled = compile_schema(
      R"({"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer",
      "minimum": 3, "maximum": 12}, "kind": {"enum": ["a", null, 3]}}, "required": ["name", "kind"]})");
  ASSERT_TRUE(compiled.grammar) << compiled.error;
  const auto start = constraint({.grammar = compiled.grammar});
  int finished = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const auto text = draw(*start, seed);
    if (!text) continue;
    ++finished;
    SCOPED_TRACE(*text);
    const auto value = json::parse(*text);
    EXPECT_LE(value.at("name").get<std::string>().size(), 20U);
    EXPECT_TRUE(value.at("kind") == "a" || value.at("kind") == nullptr || value.at("kind") == 3);
    if (value.contains("age")) {
      EXPECT_GE(value["age"], 3);
      EXPECT_LE(value["age"], 12);
    }
    EXPECT_LE(value.size(), 3U);
  }
  EXPECT_GT(finished, 50);
}

TEST_F(GrammarTest, RepliesFollowARegularExpressionOrAreAChoice) {
  const auto regex = compile({.kind = GrammarSource::Kind::regex, .text = "[a-c]{2,3}-\\d+"});
  ASSERT_TRUE(regex.grammar) << regex.error;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const auto text = draw(*constraint({.grammar = regex.grammar}), seed);
    ASSERT_TRUE(text);
    EXPECT_TRUE(std::regex_match(*text, std::regex("[a-c]{2,3}-[0-9]+"))) << *text;
  }
  const std::vector<std::string> texts{"yes", "no \"thanks\"\\", "zwölf\n"};
  const auto choice = compile(choice_grammar(texts));
  ASSERT_TRUE(choice.grammar) << choice.error;
  std::set<std::string> drawn;
  for (std::uint64_t seed = 0; seed < 50; ++seed) drawn.insert(*draw(*constraint({.grammar = choice.grammar}), seed));
  EXPECT_EQ(drawn, std::set<std::string>(texts.begin(), texts.end()));
}

TEST_F(GrammarTest, EndsOnlyWhereTheGrammarEnds) {
  const auto choice = compile(choice_grammar({"ab", "abc"}));
  const auto state = constraint({.grammar = choice.grammar})->clone();
  EXPECT_EQ(text_of(allowed(*state)), "a");
  take(*state, "ab");
  EXPECT_EQ(text_of(allowed(*state)), "c$");
  const auto copy = state->clone();
  take(*copy, "c");
  EXPECT_EQ(text_of(allowed(*copy)), "$");
  EXPECT_EQ(text_of(allowed(*state)), "c$") << "the copy advances by itself";
  EXPECT_THROW(state->take('x'), std::runtime_error);
}

TEST_F(GrammarTest, BeginsBehindTheReasoning) {
  auto source = choice_grammar({"yes", "<no"});
  source.after_blanks = true;
  const auto choice = compile(source);
  const auto begun = constraint({.reasoning = ReplyRule::Reasoning::begun, .grammar = choice.grammar})->clone();
  EXPECT_EQ(allowed(*begun).size(), 257U) << "every token but the end";
  take(*begun, "is it x</thin k></think");
  EXPECT_EQ(allowed(*begun).size(), 257U);
  take(*begun, ">");
  EXPECT_EQ(text_of(allowed(*begun)), "\t\n\r <y");
  take(*begun, "\n\nyes");
  EXPECT_EQ(text_of(allowed(*begun)), "$");

  const auto maybe = constraint({.reasoning = ReplyRule::Reasoning::maybe, .grammar = choice.grammar});
  const auto plain = maybe->clone();
  EXPECT_EQ(text_of(allowed(*plain)), "\t\n\r <y");
  take(*plain, "<");
  EXPECT_EQ(text_of(allowed(*plain)), "nt") << "<no or <think>";
  take(*plain, "no");
  EXPECT_EQ(text_of(allowed(*plain)), "$");
  const auto thinks = maybe->clone();
  take(*thinks, "<think>hm</think>yes");
  EXPECT_EQ(text_of(allowed(*thinks)), "$");
}

TEST_F(GrammarTest, ReasoningEndsAtItsLongest) {
  for (const bool grammar : {false, true}) {
    ReplyRule rule{.reasoning = ReplyRule::Reasoning::begun, .max_reasoning_tokens = 3};
    if (grammar) rule.grammar = compile(choice_grammar({"yes"})).grammar;
    const auto state = constraint(rule)->clone();
    take(*state, "abc");
    for (const char c : std::string("\n</think>")) {
      EXPECT_EQ(text_of(allowed(*state)), std::string(1, c));
      state->take(c);
    }
    EXPECT_EQ(allowed(*state).size(), grammar ? 1U : 258U);
    const auto early = constraint(rule)->clone();
    take(*early, "a");
    EXPECT_EQ(allowed(*early).size(), grammar ? 257U : 258U);
  }
  const auto none = constraint({.reasoning = ReplyRule::Reasoning::maybe, .max_reasoning_tokens = 0})->clone();
  take(*none, "<think>");
  EXPECT_EQ(text_of(allowed(*none)), "\n");
  auto without_bytes = std::make_shared<ReasoningTokens>(*tokenizer_);
  without_bytes->forced_end = {'x'};
  const auto unread = make_constraint(without_bytes, {.reasoning = ReplyRule::Reasoning::begun,
                                                      .max_reasoning_tokens = 0,
                                                      .grammar = compile(choice_grammar({"yes"})).grammar,
                                                      .ends = {kEnd}})
                          ->clone();
  take(*unread, "xyes");
  EXPECT_EQ(text_of(allowed(*unread)), "$") << "a tokenizer's </think> may have no bytes";
}

TEST_F(GrammarTest, EndsAReplyThatTakesTooLong) {
  constexpr int kMost = 3000;  // tokens; each takes longer than the one before
  const auto ambiguous =
      compile({.kind = GrammarSource::Kind::ebnf, .text = R"(root ::= root root root | root root | "a" | "")"});
  ASSERT_TRUE(ambiguous.grammar) << ambiguous.error;
  const auto state = constraint({.grammar = ambiguous.grammar})->clone();
  std::vector<float> logits(kEnd + 1, 0.0F);
  const auto follow = [&] {
    for (int i = 0; i < kMost; ++i) {
      state->exclude(logits);
      state->take('a');
    }
  };
  EXPECT_THROW(follow(), std::runtime_error);
}

TEST_F(GrammarTest, SaysWhatIsNoGrammar) {
  const auto refused = [&](GrammarSource source, const std::string& says) {
    const auto result = compile(std::move(source));
    EXPECT_FALSE(result.grammar);
    EXPECT_NE(result.error.find(says), std::string::npos) << result.error;
  };
  refused({.kind = GrammarSource::Kind::regex, .text = "(a"}, "parenthes");
  refused({.kind = GrammarSource::Kind::regex, .text = "a(?=b)c"}, "ookahead");
  refused({.kind = GrammarSource::Kind::regex, .text = "(a{1,1000}){1,1000}"}, "got repetitions that are too long");
  refused({.kind = GrammarSource::Kind::ebnf, .text = "root ::= other"}, "other");
  refused({.text = prepared_schema(R"({"type": "string", "pattern": "^a+$", "maxLength": 3})", "schema")}, "maxLength");
  refused({.text = prepared_schema(R"({"$ref": "#"})", "schema")}, "");
}

void expect_refused(const std::string& schema, const std::string& says) {
  SCOPED_TRACE(schema);
  try {
    prepared_schema(schema, "schema");
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "schema");
    EXPECT_NE((error.got() + ", expected " + error.expected()).find(says), std::string::npos) << error.what();
  }
}

TEST(Expansion, CountsWhatIsWrittenOut) {
  EXPECT_EQ(expanded_size("abc"), 3);
  EXPECT_EQ(expanded_size("a{3}b"), 4);
  EXPECT_EQ(expanded_size("(ab{2,5}){10}|[x{9}]"), 62);
  EXPECT_EQ(expanded_size("\\{5}"), 3) << "no repetition";
  EXPECT_GT(expanded_size("((a{1,99}){1,99}){1,99}"), kMostExpanded);
  EXPECT_EQ(expanded_repeats(R"(root ::= [a]{3} "x{9}" b{2,4})"), 12 * 9);
  EXPECT_GT(expanded_repeats("root ::= ([a]{1,1000}){1,1000}"), kMostExpanded);
}

TEST(JsonSchema, RefusesKeywordsThatAGrammarWouldIgnore) {
  for (const char* name : {"uniqueItems", "contains", "minContains", "not", "if", "then", "else", "dependentRequired",
                           "dependentSchemas", "patternProperties", "propertyNames", "unevaluatedProperties",
                           "unevaluatedItems", "additionalItems", "contentEncoding", "requierd"}) {
    const std::string keyword = "\"" + std::string(name) + "\": true";
    expect_refused("{\"type\": \"object\", " + keyword + "}", "the keyword " + std::string(name) + " at #");
    expect_refused(R"({"properties": {"a": {"items": {)" + keyword + "}}}}",
                   std::string(name) + " at #/properties/a/items");
  }
  expect_refused(R"({"anyOf": [{}], "type": "object"})", "the keyword type at #");
  expect_refused(R"({"$ref": "#/$defs/a", "properties": {}, "$defs": {"a": {}}})", "the keyword properties");
  expect_refused(R"({"$defs": {"a": {"not": {}}}})", "not at #/$defs/a");
  expect_refused(R"({"$ref": "other.json"})", "$ref");
  for (const char* other : {"#/$defs/a/enum/0", "#/$defs", "#/$defs/a%2Fenum%2F0", "#a", "#/"}) {
    expect_refused(R"({"$ref": ")" + std::string(other) + R"(", "$defs": {"a": {"const": {"not": {}}}}})",
                   "another $ref at #");
  }
  expect_refused(R"({"allOf": [{}, {}]})", "allOf with several schemas");
  expect_refused(R"({"type": "string", "format": "regex"})", "format \"regex\" at #, expected one of date, ");
  expect_refused(R"({"minimum": 3, "minLength": 1})", "keywords of several types");
  expect_refused(R"({"type": "text"})", "a type that is none");
  expect_refused(R"({"type": "integer", "enum": ["a"]})", "no value of the type in enum");
  expect_refused(R"({"properties": {"a": {}}, "required": ["b"]})", "required with \"b\"");
  expect_refused(R"({"type": "string", "maxLength": 1000000})", "maxLength 1000000 at #, expected a whole number");
  expect_refused(R"({"type": "array", "minItems": 3, "maxItems": 2})", "minItems above maxItems");
  expect_refused("[1]", "no schema");
  expect_refused("{", "no JSON");
  expect_refused("\"" + std::string(300'000, 'a') + "\"", "at most 262144");
  std::string deep = "{}";
  for (int i = 0; i < 100; ++i) deep = R"({"items": )" + deep + "}";
  expect_refused(deep, "nested at most");
  expect_refused(R"({"const": )" + std::string(100'000, '[') + std::string(100'000, ']') + "}", "at most 256 levels");
}

TEST(JsonSchema, SaysWhatItLeavesOpen) {
  const auto prepared = [](const std::string& schema) { return json::parse(prepared_schema(schema, "schema")); };
  EXPECT_EQ(prepared(R"({"properties": {"b": {}, "a": {}}})")["additionalProperties"], false);
  EXPECT_EQ(prepared(R"({"type": "object"})")["additionalProperties"], true);
  EXPECT_EQ(prepared(R"({"minimum": 3})")["type"], "number");
  EXPECT_EQ(prepared(R"({"type": "integer", "enum": [1, "a", 2.0]})")["enum"], json::parse("[1, 2.0]"));
  EXPECT_EQ(prepared(R"({"required": ["a"]})")["properties"]["a"], true);
  EXPECT_EQ(prepared_schema(R"({"type": "integer", "nullable": true})", "schema"), R"({"type":"integer"})");
  EXPECT_EQ(prepared(R"({"type": "integer", "items": {"not": {}}, "minimum": 1})"),
            json::parse(R"({"type": "integer", "minimum": 1})"))
      << "keywords of other types say nothing";
  EXPECT_NO_THROW(prepared(R"({"$ref": "#/$defs/a/properties/enum", "$defs": {"a": {"properties": {"enum": {}}}}})"));
  EXPECT_EQ(prepared_schema(R"({"properties": {"b": {}, "a": {}}, "title": "t"})", "schema").find("\"b\":{},\"a\":{}"),
            15U)
      << "properties keep their order";
}

}  // namespace
}  // namespace efla::serve
