// What the API takes and refuses, without a server.
#include "efla/serve/api/requests.h"

#include <gtest/gtest.h>

#include "efla/io/safetensors/safetensors.h"
#include "efla/serve/api/base64.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/api/keys.h"
#include "efla/serve/api/state_keys.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::serve {
namespace {

GenerationRequest completion_of(const std::string& body) { return parse_completion(parse_body(body), body); }
GenerationRequest chat_of(const std::string& body) { return parse_chat(parse_body(body), body); }
GenerationRequest response_of(const std::string& body) { return parse_response(parse_body(body), body); }

template <class Parse>
void expect_refused(const Parse& parse, const std::string& body, const std::string& param, const std::string& says) {
  SCOPED_TRACE(body);
  try {
    if constexpr (std::is_same_v<Parse, GenerationRequest(const std::string&)>) {
      parse(body);
    } else {
      parse(parse_body(body));
    }
    ADD_FAILURE() << "not refused";
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.param, param) << error.message;
    EXPECT_NE(error.message.find(says), std::string::npos) << error.message;
  }
}

TEST(Requests, CompletionTakesEveryField) {
  const auto request = completion_of(R"({"model": "m", "prompt": "a", "max_tokens": 5, "n": 3,
      "temperature": 0.5, "top_p": 0.9, "top_k": 7, "presence_penalty": 1, "frequency_penalty": -1,
      "repetition_penalty": 1.1, "logit_bias": {"5": -100, "6": 3.5}, "seed": -1, "stop": ["x", "y"],
      "stop_token_ids": [4], "logprobs": 2, "echo": true, "stream": true, "stream_options": {"include_usage": true},
      "add_special_tokens": false, "session": "book", "user": "u", "return_state": false, "cache_tokens": 640})");
  EXPECT_EQ(request.model, "m");
  EXPECT_EQ(std::get<std::string>(request.prompts.at(0)), "a");
  EXPECT_EQ(request.max_tokens, 5);
  EXPECT_EQ(request.n, 3);
  EXPECT_EQ(request.sampling.temperature, 0.5);
  EXPECT_EQ(request.sampling.top_p, 0.9);
  EXPECT_EQ(request.sampling.top_k, 7);
  EXPECT_EQ(request.sampling.presence_penalty, 1);
  EXPECT_EQ(request.sampling.frequency_penalty, -1);
  EXPECT_EQ(request.sampling.repetition_penalty, 1.1);
  EXPECT_EQ(request.sampling.logit_bias, (std::map<std::int32_t, double>{{5, -100}, {6, 3.5}}));
  EXPECT_EQ(request.sampling.seed, UINT64_MAX);
  EXPECT_EQ(request.stop, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(request.stop_token_ids, (std::vector<std::int32_t>{4}));
  EXPECT_EQ(request.logprobs, 2);
  EXPECT_TRUE(request.echo && request.stream && request.include_usage);
  EXPECT_EQ(request.bos, false);
  EXPECT_EQ(request.session, "book");
  EXPECT_EQ(request.cache_tokens, 640);
  EXPECT_EQ(completion_of(R"({"prompt": "a", "stop": null, "seed": null})").max_tokens, 16);
}

TEST(Requests, PromptsAreTextsOrIdsOrLists) {
  const auto prompts = [](const std::string& prompt) { return completion_of(R"({"prompt": )" + prompt + "}").prompts; };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(std::get<Ids>(prompts("[1, 2, 3]").at(0)), (Ids{1, 2, 3}));
  EXPECT_EQ(prompts(R"(["a", "b"])").size(), 2U);
  EXPECT_EQ(std::get<Ids>(prompts("[[1], [2, 3]]").at(1)), (Ids{2, 3}));
  EXPECT_EQ(prompts(R"(["a", [4]])").size(), 2U);
  EXPECT_EQ(std::get<Ids>(prompts("[]").at(0)), Ids{});
}

TEST(Requests, CompletionRefusesByName) {
  const auto refused = [](const std::string& body, const std::string& param, const std::string& says) {
    expect_refused(completion_of, body, param, says);
  };
  refused("[]", "", "expected an object");
  refused("{}", "prompt", "got nothing");
  refused(R"({"prompt": 3})", "prompt", "got 3");
  refused(R"({"prompt": [1, "a"]})", "prompt", "token ids");
  refused(R"({"prompt": [-1]})", "prompt", "not -1");
  refused(R"({"prompt": [1.5]})", "prompt", "not 1.5");
  refused(R"({"prompt": [[[1]]]})", "prompt", "not [1]");
  refused(R"({"prompt": [99999999999]})", "prompt", "token ids");
  refused(R"({"prompt": "a", "best_of": 2})", "best_of", "expected the value of n");
  refused(R"({"prompt": "a", "tools": [{}]})", "tools", "expected [], all that is supported");
  refused(R"({"prompt": "a", "temprature": 1})", "temprature", "nearest: temperature");
  refused(R"({"prompt": "a", "temperature": "hot"})", "temperature", "got \"hot\", expected a number from 0 to 100");
  refused(R"({"prompt": "a", "temperature": -0.1})", "temperature", "got -0.1");
  refused(R"({"prompt": "a", "top_p": "half"})", "top_p", "expected a number");
  refused(R"({"prompt": "a", "top_p": -0.1})", "top_p", "expected a number from 0 to 1");
  refused(R"({"prompt": "a", "max_tokens": 1.5})", "max_tokens", "whole number of at least 0");
  refused(R"({"prompt": "a", "max_tokens": 18446744073709551615})", "max_tokens", "whole number");
  refused(R"({"prompt": "a", "max_tokens": true})", "max_tokens", "got true");
  refused(R"({"prompt": "a", "n": 0})", "n", "from 1 to 128");
  refused(R"({"prompt": "a", "n": 2, "save_as": "x"})", "n", "several replies");
  refused(R"({"prompt": ["a", "b"], "return_state": true})", "prompt", "several replies");
  refused(R"({"prompt": "a", "n": 2, "return_state": true})", "n", "several replies");
  refused(R"({"prompt": "a", "logprobs": 21})", "logprobs", "from 0 to 20");
  refused(R"({"prompt": "a", "stop": ""})", "stop", "none empty");
  refused(R"({"prompt": "a", "stop": [1]})", "stop", "texts");
  refused(R"({"prompt": "a", "logit_bias": {"x": 1}})", "logit_bias", "token ids");
  refused(R"({"prompt": "a", "logit_bias": {"1": 101}})", "logit_bias", "-100 to 100");
  refused(R"({"prompt": "a", "logit_bias": {"9999999999": 1}})", "logit_bias", "token ids");
  refused(R"({"prompt": "a", "stream_options": {"include_usage": true}})", "stream_options",
          "expected only with \"stream\": true");
  refused(R"({"prompt": "a", "stream": true, "stream_options": {"x": 1}})", "stream_options.x",
          "expected no such field");
  refused(R"({"prompt": "a", "session": "../x"})", "session", "letters, digits");
  refused(R"({"prompt": "a", "session": "_1"})", "session", "begin with a letter");
  refused(R"({"prompt": "a", "session": "b", "state": "AAAA"})", "state", "expected only without \"session\"");
  refused(R"({"prompt": "a", "state": "A"})", "state", "base64");
  refused(R"({"prompt": "a", "save_as": "x", "return_state": true})", "save_as", "one of the two");
  refused(R"({"prompt": "a", "disposable": true})", "disposable", "expected only with \"save_as\"");
}

TEST(Requests, BodiesThatAreNotJson) {
  const auto refused = [](const std::string& body, const std::string& says) {
    expect_refused(completion_of, body, "", says);
  };
  refused("", "not JSON");
  refused("{\"prompt\": \"a\"", "byte 14");
  refused("{\"prompt\": NaN}", "not JSON");
  refused("{\"prompt\": \"a\", \"temperature\": 1e999}", "beyond float64");
  refused("{\"prompt\": \"\xff\"}", "at byte 12: not JSON: not UTF-8");
  refused("{\"prompt\": \"a\xc3\"}", "not JSON: not UTF-8");
  refused(R"({"prompt": "\ud800"})", "not JSON: half of a surrogate pair");
  refused(R"({"prompt": "\udc00"})", "not JSON: half of a surrogate pair");
  refused(std::string(100'000, '['), "deeper than 256");
  refused("{\"prompt\": \"a\"} x", "not JSON");
}

TEST(Requests, ChatTakesMessagesOfTextAndOfParts) {
  const auto request = chat_of(R"({"messages": [{"role": "developer", "content": "be"},
      {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
      "max_tokens": 3, "max_completion_tokens": 4, "logprobs": true, "top_logprobs": 2})");
  ASSERT_EQ(request.chat.messages.size(), 2U);
  EXPECT_EQ(request.chat.messages[0].role, "system");
  EXPECT_EQ(request.chat.messages[1].content, "ab");
  EXPECT_EQ(request.max_tokens, 4);
  EXPECT_EQ(request.logprobs, 2);
  const auto refused = [](const std::string& body, const std::string& param, const std::string& says) {
    expect_refused(chat_of, body, param, says);
  };
  refused("{}", "messages", "a list of messages");
  refused(R"({"messages": 3})", "messages", "a list of messages");
  refused(R"({"messages": []})", "messages", "got [], expected at least one message");
  refused(R"({"messages": [3]})", "messages[0]", "expected an object");
  refused(R"({"messages": [{"role": "user"}]})", "messages[0].content", "got nothing");
  refused(R"({"messages": [{"role": "user", "content": "a", "nam": "b"}]})", "messages[0].nam",
          "nearest: messages[0].name");
  refused(R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})", "messages[0].content[0].type",
          "expected \"text\"");
  const std::string part =
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": )";
  EXPECT_TRUE(chat_of(part + R"({"type": "ephemeral"}}]}]})").chat.messages[0].cached);
  EXPECT_FALSE(request.chat.messages[1].cached);
  std::string five = R"({"messages": [)";
  for (int i = 0; i < 5; ++i) {
    five += std::string(i > 0 ? "," : "") +
            R"({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]})";
  }
  refused(five + "]}", "messages", "got 5 messages with cache_control, expected at most 4");
  refused(part + R"({"type": "forever"}}]}]})", "messages[0].content[0].cache_control.type", "expected \"ephemeral\"");
  refused(part + R"({"type": "ephemeral", "ttl": "2h"}}]}]})", "messages[0].content[0].cache_control.ttl",
          "expected \"5m\" or \"1h\"");
  refused(R"({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2})", "top_logprobs",
          "expected only with \"logprobs\": true");
  refused(R"({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]})", "tools[0].function",
          "expected an object");
}

TEST(Requests, WholeNumbersMayHaveAPoint) {
  const auto request = completion_of(
      R"({"prompt": [97.0, 98], "max_tokens": 4.0, "seed": 1.0, "n": 2.0, "top_k": 3.0, "stop_token_ids": [7.0]})");
  EXPECT_EQ(std::get<std::vector<std::int32_t>>(request.prompts.at(0)), (std::vector<std::int32_t>{97, 98}));
  EXPECT_EQ(request.max_tokens, 4);
  EXPECT_EQ(request.sampling.seed, 1U);
  EXPECT_EQ(request.n, 2);
  EXPECT_EQ(request.sampling.top_k, 3);
  EXPECT_EQ(request.stop_token_ids, std::vector<std::int32_t>{7});
  expect_refused(completion_of, R"({"prompt": "a", "max_tokens": 4.5})", "max_tokens", "whole number");
}

// What clients send when they write out defaults, and what they send back of a reply.
const std::vector<std::string>& defaults() {
  static const std::vector<std::string> kFields{
      R"("tools": [])",
      R"("tool_choice": "none")",
      R"("tool_choice": "auto")",
      R"("parallel_tool_calls": false)",
      R"("parallel_tool_calls": true)",
      R"("functions": [])",
      R"("response_format": {"type": "text"})",
      R"("text": {"format": {"type": "text", "schema": null}})",
      R"("n": 1)",
      R"("store": false)",
      R"("metadata": {})",
      R"("ignore_eos": false)",
      R"("min_p": 0)",
      R"("min_p": 0.0)",
      R"("top_logprobs": 0)",
      R"("service_tier": "auto")",
      R"("truncation": "disabled")",
      R"("include": [])",
      R"("reasoning": {"effort": null, "summary": null})",
      R"("stop": [])",
      R"("logit_bias": {})",
      R"("stream": false)",
      R"("stream_options": {})",
      R"("top_p": 0)",
      R"("suffix": null, "tools": null, "response_format": null, "an_unknown_field": null)"};
  return kFields;
}

TEST(Requests, TakeWhatAsksForWhatTheServerDoesAnyway) {
  for (const auto& field : defaults()) {
    SCOPED_TRACE(field);
    EXPECT_NO_THROW(completion_of(R"({"prompt": "a", )" + field + "}"));
    EXPECT_NO_THROW(chat_of(R"({"messages": [{"role": "user", "content": "a"}], )" + field + "}"));
    EXPECT_NO_THROW(response_of(R"({"input": "a", )" + field + "}"));
  }
  EXPECT_NO_THROW(completion_of(R"({"prompt": "a", "best_of": 3, "n": 3})"));
  EXPECT_EQ(completion_of(R"({"prompt": "a", "n": 3, "echo": true})").n, 3);
  EXPECT_TRUE(response_of(R"({"input": "a", "store": true})").store);
  const auto refused = [](const std::string& field, const std::string& name, const std::string& says) {
    expect_refused(chat_of, R"({"messages": [{"role": "user", "content": "a"}], )" + field + "}", name, says);
  };
  refused(R"("tool_choice": "required")", "tool_choice", "got a call of a tool, expected a tool that tools has");
  refused(R"("tool_choice": "a")", "tool_choice", "expected auto, none, required, or a function");
  refused(R"("tool_choice": {"type": "function", "function": {"name": "b"}}, "tools": [{"type": "function",
      "function": {"name": "a"}}])",
          "tool_choice", "got \"b\"");
  refused(R"("tools": [{"type": "function", "function": {"name": "a", "strict": true, "parameters": {"not": {}}}}])",
          "tools[0].function.parameters", "the keyword not");
  refused(R"("store": true)", "store", "got true, expected false");
  refused(R"("metadata": {"a": "b"})", "metadata", "expected {}");
  refused(R"("min_p": 0.1)", "min_p", "expected 0");
  refused(R"("stream_options": {"include_usage": true})", "stream_options", "expected only with \"stream\": true");
}

TEST(Requests, FormsOfReplies) {
  const auto chat = [](const std::string& field) {
    return chat_of(R"({"messages": [{"role": "user", "content": "a"}], )" + field + "}");
  };
  using Kind = GrammarSource::Kind;
  EXPECT_FALSE(chat(R"("response_format": {"type": "text"})").grammar);
  EXPECT_EQ(chat(R"("response_format": {"type": "json_object"})").grammar->text, R"({"type":"object"})");
  const auto schema = chat(R"("response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true,
      "schema": {"properties": {"b": {}, "a": {}}}}})");
  EXPECT_EQ(schema.grammar->kind, Kind::schema);
  EXPECT_EQ(schema.grammar_field, "response_format");
  EXPECT_LT(schema.grammar->text.find("\"b\""), schema.grammar->text.find("\"a\"")) << "in the client's order";
  const auto response = response_of(R"({"input": "a", "text": {"format": {"type": "json_schema", "name": "n",
      "schema": {"type": "null"}}, "verbosity": "medium"}})");
  EXPECT_EQ(response.grammar->text, R"({"type":"null"})");
  EXPECT_EQ(response.grammar_field, "text");
  const auto output = [](const std::string& member) {
    return completion_of(R"({"prompt": "a", "structured_outputs": {)" + member + "}}").grammar.value();
  };
  EXPECT_EQ(output(R"("json": {"type": "null"})"), output(R"("json": "{\"type\": \"null\"}")"));
  EXPECT_EQ(output(R"("regex": "a+")").kind, Kind::regex);
  EXPECT_EQ(output(R"("choice": ["a", "\"b"])").text, R"(root ::= "a" | "\"b")");
  EXPECT_EQ(output(R"("grammar": "root ::= [a]")").kind, Kind::ebnf);
  const auto refused = [](const std::string& field, const std::string& name, const std::string& says) {
    expect_refused(completion_of, R"({"prompt": "a", )" + field + "}", name, says);
  };
  refused(R"("response_format": {"type": "xml"})", "response_format.type", "expected text, json_object or json_schema");
  refused(R"("response_format": {"type": "json_schema", "json_schema": {"name": "n"}})",
          "response_format.json_schema.schema", "expected a JSON schema");
  refused(
      R"("response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": true}}})",
      "response_format.json_schema.schema", "got the keyword uniqueItems at #, expected only keywords");
  refused(R"("structured_outputs": {})", "structured_outputs", "expected json, json_object, regex, choice or grammar");
  refused(R"("structured_outputs": {"regex": ""})", "structured_outputs.regex", "expected 1 to");
  refused(R"("structured_outputs": {"choice": []})", "structured_outputs.choice", "expected 1 to 1024 texts");
  refused(R"("structured_outputs": {"regex": "a", "choice": ["a"]})", "structured_outputs.choice",
          "expected none beside structured_outputs.regex");
  refused(R"("structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"})",
          "structured_outputs.regex", "expected none beside response_format");
  refused(R"("structured_outputs": {"json": "{"})", "structured_outputs.json", "expected a JSON schema");
}

TEST(Requests, MessagesMayHaveWhatARepliesMessageHas) {
  const std::string more =
      R"("refusal": null, "annotations": null, "audio": null, "function_call": null, "tool_calls": null,
      "reasoning_content": null, "name": "b")";
  const auto chat = chat_of(R"({"messages": [{"role": "user", "content": "hi"},
      {"role": "assistant", "content": "ok", )" +
                            more + R"(}, {"role": "assistant", "content": "ok", "annotations": [],
      "tool_calls": []}, {"role": "user", "content": "go on"}]})");
  ASSERT_EQ(chat.chat.messages.size(), 4U);
  EXPECT_EQ(chat.chat.messages[1].content, "ok");
  const auto response = response_of(R"({"input": [{"role": "user", "content": "hi"},
      {"id": "msg_1", "content": [{"annotations": [], "text": "ok", "type": "output_text", "logprobs": null}],
      "role": "assistant", "status": "completed", "type": "message", "phase": null}]})");
  EXPECT_EQ(response.chat.messages.at(1).content, "ok");
  expect_refused(chat_of, R"({"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "x"}]}]})",
                 "messages[0].tool_calls", "expected [], all that is supported");
}

TEST(Requests, ResponsesTakeTextAndMessages) {
  const auto request = response_of(R"({"input": "hello", "instructions": "be", "max_output_tokens": 3,
      "previous_response_id": "resp_1", "store": false})");
  ASSERT_EQ(request.chat.messages.size(), 2U);
  EXPECT_EQ(request.chat.messages[0].role, "system");
  EXPECT_EQ(request.previous_response, "resp_1");
  EXPECT_FALSE(request.store);
  const auto list = response_of(
      R"({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]})");
  EXPECT_EQ(list.chat.messages.at(0).content, "a");
  EXPECT_TRUE(list.store);
  expect_refused(response_of, "{}", "input", "got nothing");
  expect_refused(response_of, R"({"input": "a", "reasoning": {"effort": "high"}})", "reasoning", "expected {}");
}

TEST(Requests, ItemsOfAReplyAreOneMessage) {
  const auto request = response_of(R"({"input": [{"role": "user", "content": "a"},
      {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]},
      {"role": "assistant", "content": "b", "reasoning_content": "!",
       "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]})");
  ASSERT_EQ(request.chat.messages.size(), 2U);
  const auto& message = request.chat.messages[1];
  EXPECT_EQ(message.reasoning, "why!");
  EXPECT_EQ(message.content, "b");
  EXPECT_EQ(message.tool_calls, (std::vector<ToolCall>{{"c1", "f", "{}"}}));
  expect_refused(response_of, R"({"input": [{"type": "web_search_call", "id": "w"}]})", "input[0].type",
                 "got \"web_search_call\", expected message, reasoning");
}

TEST(Requests, TokenizeDetokenizeAndSessions) {
  EXPECT_EQ(parse_tokenize(parse_body(R"({"prompt": "a", "add_special_tokens": true})")).bos, true);
  expect_refused(parse_tokenize, "{}", "prompt", "got nothing");
  EXPECT_EQ(parse_detokenize(parse_body(R"({"tokens": [1, 2]})")).size(), 2U);
  expect_refused(parse_detokenize, R"({"tokens": "a"})", "tokens", "list of token ids");
  EXPECT_EQ(parse_create_session(parse_body(R"({"name": "a", "prompt": "b"})")).name, "a");
  expect_refused(parse_create_session, R"({"name": "a"})", "prompt", "got nothing");
  EXPECT_EQ(parse_fork(parse_body("{}")), "");
  EXPECT_EQ(parse_rewind(parse_body(R"({"tokens": 3})")), 3);
  expect_refused(parse_rewind, "{}", "tokens", "got nothing");
  expect_refused(parse_rewind, R"({"tokens": -1})", "tokens", "at least 0");
}

TEST(Base64, EveryLengthAndNothingElse) {
  std::string bytes;
  for (int i = 0; i < 70; ++i) {
    EXPECT_EQ(from_base64(to_base64(bytes)), bytes);
    bytes += static_cast<char>(i * 37);
  }
  EXPECT_EQ(to_base64("ab"), "YWI=");
  for (const char* text : {"A", "AAA", "AA=A", "A===", "====", "AA\n=", "AA-_"})
    EXPECT_FALSE(from_base64(text)) << text;
}

TEST(ApiKeys, AdmitTheirHoldersAlone) {
  EXPECT_EQ(Keys().client("anything"), "");
  const test::TempFolder folder;
  const Keys keys(read_keys(test::write_text(folder / "keys", "# ours\nalpha\n\nbeta \r\n"), "--api-keys"));
  EXPECT_EQ(keys.client("Bearer alpha")->size(), 12U);
  EXPECT_NE(keys.client("Bearer alpha"), keys.client("Bearer beta"));
  for (const char* wrong : {"", "alpha", "Bearer", "Bearer ", "Bearer alph", "Bearer alphaa", "Basic alpha"}) {
    EXPECT_FALSE(keys.client(wrong)) << wrong;
  }
  test::expect_error([&] { read_keys(test::write_text(folder / "none", "# nothing\n"), "--api-keys"); }, "--api-keys",
                     "without a key");
  EXPECT_EQ(read_client_keys(test::write_text(folder / "keys", "!~\n"), "--api-keys").size(), 1U);
  for (const char* key :
       {"al pha", "cl\xc3\xa9", "al\x7fpha", " alpha", "al\tpha", "alpha\t", "al\x01pha", "al\xffpha", "alpha\xc3"}) {
    const auto file = test::write_text(folder / "keys", "# ours\nbeta\n\n" + std::string(key) + "\n");
    test::expect_error([&] { read_client_keys(file, "--api-keys"); }, "--api-keys",
                       "got a blank, a control character or a character beyond ASCII in key 2 of " + file.string());
  }
}

TEST(StateKeys, TakeWhatTheySignedAlone) {
  const std::vector<float> values{1.0F, -2.0F};
  const io::NamedTensor tensor{
      "layers.0.memory", io::TensorType::F32, {2}, {reinterpret_cast<const std::uint8_t*>(values.data()), 8}};
  const std::string held = R"(quoted "signature":" text)";
  const auto file = io::safetensors_bytes(std::span(&tensor, 1), {{"held", held}});
  const StateKeys ours({"a", "b"}), rotated({"new", "a"}), other({"b2"});
  const auto made = ours.sign(file);
  const auto content = io::parse_safetensors(io::as_bytes(made), "state");
  EXPECT_EQ(content.metadata.at("held"), held);
  EXPECT_EQ(content.tensors.at(0).bytes.size(), 8U);
  ours.require_signature(made, "state");
  rotated.require_signature(made, "state");
  StateKeys().require_signature(file, "state");
  EXPECT_EQ(StateKeys().sign(file), file);
  ours.require_signature(ours.sign(made), "state");

  const auto refused = [](const StateKeys& keys, const std::string& bytes, const std::string& says) {
    expect_refused([&](const auto&) { keys.require_signature(bytes, "state"); }, "{}", "state", says);
  };
  refused(other, made, "wrong signature");
  for (const std::string& bytes : {file, std::string(), std::string("1234567"), std::string(8, '\xff') + "{}"}) {
    refused(ours, bytes, "without a signature");
  }
  for (std::size_t i = 0; i < made.size(); ++i) {
    auto changed = made;
    changed[i] ^= 1;
    refused(ours, changed, "signature");
  }
  for (std::size_t size = 0; size < made.size(); ++size) refused(ours, made.substr(0, size), "signature");
  refused(ours, made + " ", "wrong signature");
}

}  // namespace
}  // namespace efla::serve
