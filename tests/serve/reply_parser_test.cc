// Replies are taken apart in the same way wherever their text is cut.
#include "efla/serve/chat/reply_parser.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "efla/serve/chat/json_slices.h"

namespace efla::serve {
namespace {

using nlohmann::json;
using Kind = ReplyDelta::Kind;

const std::vector<Tool> kTools{
    make_tool("get",
              json::parse(R"({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
        "list": {"type": "array"}, "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "any": {},
        "yes": {"type": ["boolean", "null"]}, "of": {"type": "object"}}})")),
    make_tool("now", json::object())};

struct Expected {
  std::string reasoning, content;
  std::vector<std::pair<std::string, std::string>> calls = {};
};

void add_to(ReplyDelta delta, Expected& all) {
  switch (delta.kind) {
    case Kind::reasoning:
      all.reasoning += delta.text;
      break;
    case Kind::content:
      all.content += delta.text;
      break;
    case Kind::call:
      EXPECT_EQ(delta.call, all.calls.size());
      all.calls.emplace_back(delta.text, "");
      break;
    case Kind::arguments:
      all.calls.at(delta.call).second += delta.text;
  }
}

void expect_parsed(const ReplyFormat& format, const std::vector<std::string>& pieces, const Expected& expected,
                   bool cut) {
  ReplyParser parser(format);
  Expected deltas;
  for (const auto& piece : pieces) {
    for (const auto& delta : parser.push(piece)) add_to(delta, deltas);
  }
  for (const auto& delta : parser.finish(cut)) add_to(delta, deltas);
  EXPECT_EQ(parser.reasoning(), expected.reasoning);
  EXPECT_EQ(parser.content(), expected.content);
  std::vector<std::pair<std::string, std::string>> calls;
  for (const auto& call : parser.calls()) {
    EXPECT_EQ(call.id, "id" + std::to_string(calls.size()));
    calls.emplace_back(call.name, call.arguments);
  }
  EXPECT_EQ(calls, expected.calls);
  EXPECT_EQ(deltas.reasoning, expected.reasoning);
  EXPECT_EQ(deltas.content, expected.content);
  EXPECT_EQ(deltas.calls, expected.calls);
}

// Expects this of the text in one piece, in two pieces cut at each byte, and byte by byte.
void expect_reply(ReplyFormat format, const std::string& text, const Expected& expected, bool cut = false) {
  SCOPED_TRACE(text);
  format.tools = kTools;
  format.id = "id";
  expect_parsed(format, {text}, expected, cut);
  std::vector<std::string> bytes;
  for (std::size_t at = 0; at < text.size(); ++at) {
    expect_parsed(format, {text.substr(0, at), text.substr(at)}, expected, cut);
    bytes.push_back(text.substr(at, 1));
  }
  expect_parsed(format, bytes, expected, cut);
}

TEST(ReplyParser, LeavesATextWithoutAFormatAsItIs) {
  for (const std::string text : {"", " a <think> b </think> <tool_call>{} \n", "\n{\"name\": \"now\"}"}) {
    expect_reply({}, text, {"", text});
  }
}

TEST(ReplyParser, TakesReasoningApart) {
  const ReplyFormat opened{.reasoning = true, .in_reasoning = true}, closed{.reasoning = true};
  expect_reply(opened, "why\n\nso\n</think>\n\nHi </think>", {"why\n\nso", "Hi </think>"});
  expect_reply(closed, "\n<think>\nwhy\n</think>\n\nHi", {"why", "Hi"});
  expect_reply(closed, " Hi <think>", {"", " Hi <think>"});
  expect_reply(closed, "<thin", {"", "<thin"});
  expect_reply(closed, "<think></think>Hi\n", {"", "Hi\n"});
  expect_reply(opened, "why </thin", {"why </thin", ""}, true);
  expect_reply(opened, "", {"", ""}, true);
  expect_reply(opened, "a</think>\n<think>b</think>", {"a", "<think>b</think>"});
}

TEST(ReplyParser, FindsCallsInXml) {
  const ReplyFormat format{.reasoning = true, .in_reasoning = true, .calls = ToolFormat::xml};
  const std::string call =
      "<tool_call>\n<function=get>\n<parameter=city>\nA \"b\"\nc\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
      "</function>\n</tool_call>";
  const std::string arguments = R"({"city": "A \"b\"\nc", "days": 3})";
  expect_reply(format, "why</think>\n\nI look.\n\n" + call + "\n", {"why", "I look.", {{"get", arguments}}});
  expect_reply(format, "</think>" + call + "\n" + call, {"", "", {{"get", arguments}, {"get", arguments}}});
  expect_reply(format, "</think>" + call + "\nmore ", {"", "more", {{"get", arguments}}});
  ReplyFormat one = format;
  one.one_call = true;
  expect_reply(one, "</think>" + call + "\n" + call, {"", "", {{"get", arguments}}});
  // Without the outer tags, without a parameter, and with the inner form of JSON.
  expect_reply(format, "</think><function=now>\n</function>", {"", "", {{"now", "{}"}}});
  expect_reply(format, "</think><tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>",
               {"", "", {{"now", "{}"}}});
  const auto value = [&](const std::string& name, const std::string& text, const std::string& json) {
    expect_reply(
        format,
        "</think><tool_call><function=get><parameter=" + name + ">\n" + text + "\n</parameter></function></tool_call>",
        {"", "", {{"get", "{\"" + name + "\": " + json + "}"}}});
  };
  value("days", "x", "\"x\"");
  value("days", "-7", "-7");
  value("list", "[1, {\"a\": 2}]", "[1, {\"a\": 2}]");
  value("list", "[1,", "\"[1,\"");
  value("maybe", "null", "null");
  value("maybe", "2.5e3", "2.5e3");
  value("yes", "True", "true");
  value("of", "{\"b\": 1, \"a\": 2}", "{\"b\": 1, \"a\": 2}");
  value("any", "3", "\"3\"");
  value("other", "<b>&lt;", "\"<b>&lt;\"");
  value("city", "", "\"\"");
  value("city", "\n x \n", "\"\\n x \\n\"");
}

TEST(ReplyParser, GivesACallThatIsCutOff) {
  const ReplyFormat format{.calls = ToolFormat::xml};
  const std::string begin = "<tool_call>\n<function=get>\n<parameter=days>\n3\n</parameter>\n";
  expect_reply(format, begin, {"", "", {{"get", R"({"days": 3)"}}}, true);
  expect_reply(format, begin + "<parameter=city>\nLong te", {"", "", {{"get", R"({"days": 3, "city": "Long te)"}}},
               true);
  expect_reply(format, begin + "<parameter=city>\nLong te</para",
               {"", "", {{"get", R"({"days": 3, "city": "Long te)"}}}, true);
  expect_reply(format, begin + "<parameter=maybe>\n12", {"", "", {{"get", R"({"days": 3)"}}}, true);
  expect_reply(format, begin + "<parameter=ci", {"", "", {{"get", R"({"days": 3)"}}}, true);
  // The model has ended the reply too early.
  expect_reply(format, begin, {"", "", {{"get", R"({"days": 3})"}}});
  expect_reply(format, begin + "<parameter=city>\nA\n</function>", {"", "", {{"get", R"({"days": 3, "city": "A"})"}}});
  expect_reply({.calls = ToolFormat::hermes}, R"(a <tool_call>{"name": "get", "arguments": {"city": "Lo)",
               {"", "a", {{"get", R"({"city": "Lo)"}}}, true);
  expect_reply({.calls = ToolFormat::json}, R"({"name": "get", "parameters": {"days": 1)",
               {"", "", {{"get", R"({"days": 1)"}}}, true);
  // The arguments have not begun.
  for (const std::string rest : {",", ", \"argum", ", \"arguments\":"}) {
    expect_reply({.calls = ToolFormat::hermes}, "<tool_call>{\"name\": \"get\"" + rest, {"", "", {{"get", ""}}}, true);
  }
  expect_reply({.calls = ToolFormat::hermes}, "<tool_call>{\"name\": \"get\",", {"", "", {{"get", "{}"}}});
}

TEST(ReplyParser, FindsCallsInJson) {
  const ReplyFormat hermes{.calls = ToolFormat::hermes}, plain{.calls = ToolFormat::json};
  const std::string call = R"({"name": "get", "arguments": {"days": 3, "city": "}\"{"}})";
  const std::string arguments = R"({"days": 3, "city": "}\"{"})";
  expect_reply(hermes, "Hi\n<tool_call>\n" + call + "\n</tool_call>\n<tool_call>" + call + "</tool_call>",
               {"", "Hi", {{"get", arguments}, {"get", arguments}}});
  expect_reply(hermes, R"(<tool_call>{"name": "get", "arguments": "{\"days\": 3}"}</tool_call>)",
               {"", "", {{"get", R"({"days": 3})"}}});
  expect_reply(plain, "\n" + call, {"", "", {{"get", arguments}}});
  expect_reply(plain, "[" + call + ",\n" + call + "]", {"", "", {{"get", arguments}, {"get", arguments}}});
  expect_reply(plain, call + "; " + call, {"", "", {{"get", arguments}, {"get", arguments}}});
  expect_reply(plain, call + "\nThat.", {"", "That.", {{"get", arguments}}});
}

TEST(ReplyParser, LeavesWhatOnlyLooksLikeACallInTheContent) {
  const ReplyFormat xml{.calls = ToolFormat::xml}, hermes{.calls = ToolFormat::hermes},
      plain{.calls = ToolFormat::json};
  for (const std::string text : {"a < b", "a <tool_cal", "a\n<tool_call> b </tool_call>", "<tool_call>",
                                 "<tool_call>\n<function=a", "<function=a\nb>", "<tool_call><function=></function>",
                                 "<tool_call>{\"a\": 1}</tool_call>", "<tool_call>{]}</tool_call> c", " a \n"}) {
    expect_reply(xml, text, {"", text});
    if (text.find("<function") == std::string::npos) expect_reply(hermes, text, {"", text});
  }
  for (const std::string text :
       {"{\"name\": \"other\", \"arguments\": {}}", "{\"a\": 1} b", "[1, 2]", "[]", "{} {\"name\": \"now\"}", "{",
        "{]} x", "x {", "[{\"name\": \"now\"}, 3]", "{\"name\": 3}", "[{\"name\": \"now\"}, {\"name\": \"other\"}]",
        "[{\"name\": \"now\"}, {\"name\": 345}]"}) {
    expect_reply(plain, text, {"", text});
  }
}

TEST(Tools, TakeNoLongForChoicesOfChoices) {
  const std::vector<json> itself(1000, {{"$ref", "#/properties/p"}});
  const json schema = {{"properties", {{"p", {{"type", "integer"}, {"anyOf", itself}}}}}};
  EXPECT_EQ(make_tool("use", schema).types.at("p"), std::vector<std::string>{"integer"});
  const auto small = json::parse(R"({"properties": {"q": {"anyOf": [{"const": 0.5}, {"enum": [1, null, 2]}]}}})");
  EXPECT_EQ(make_tool("use", small).types.at("q"), (std::vector<std::string>{"number", "integer", "null"}));
}

TEST(ToolFormats, AreWhatTheTemplateDescribes) {
  EXPECT_EQ(tool_format_of("<tool_call>\n<function=x>"), ToolFormat::xml);
  EXPECT_EQ(tool_format_of("within <tool_call></tool_call>"), ToolFormat::hermes);
  EXPECT_EQ(tool_format_of("{{ tools | tojson }}"), ToolFormat::json);
  EXPECT_EQ(tool_format_of("{{ messages }}"), ToolFormat::none);
  EXPECT_EQ(parse_tool_format("hermes"), ToolFormat::hermes);
  EXPECT_FALSE(parse_tool_format("none"));
}

TEST(JsonSlices, NumbersBeyondFloat64AreJson) {
  for (const auto& text : {"[" + std::string(400, '7') + "]", std::string("{\"\\u0041\": -1e99999}")})
    EXPECT_TRUE(is_json(text));
  for (const char* text : {"[1e]", "[01]", "[1e999", "1.", "\"\\u12\""}) EXPECT_FALSE(is_json(text)) << text;
}

}  // namespace
}  // namespace efla::serve
