// Anthropic's API over a socket: messages, their streams, counts and errors.
#include "tests/serve/chat_fixture.h"

namespace efla::serve {
namespace {

// Shows all of a conversation: reasoning, calls and results.
const std::string kConversation =
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}/{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{# <tool_call><function= </think> #}{% if add_generation_prompt %}{{ '<assistant><think>' }}{% endif %}";

class ServiceMessagesTest : public ServiceChatTest {
 protected:
  static json ask_of(const json& more = json::object()) {
    json body{{"messages", {{{"role", "user"}, {"content", "a"}}}}, {"max_tokens", 1000}, {"seed", 0}};
    body.update(more);
    return body;
  }
  static json tools() {
    return json::parse(R"([{"name": "get", "description": "d", "cache_control": {"type": "ephemeral"},
        "input_schema": {"type": "object", "properties": {"days": {"type": "integer"}}}}])");
  }
  json refusal(const json& body, int status = 400, const std::string& path = "/v1/messages") const {
    const auto reply = post(path, body, status);
    EXPECT_EQ(reply["type"], "error");
    return reply["error"];
  }
  // Returns the message that the events of a stream make, as Anthropic's client joins them, and checks their order.
  json streamed(json body) const {
    body["stream"] = true;
    json message;
    std::ptrdiff_t open = -1;
    for (const auto& event : stream("/v1/messages", body, /*done=*/false)) {
      const std::string type = event["type"];
      if (type == "message_start") {
        message = event["message"];
      } else if (type == "content_block_start") {
        EXPECT_EQ(open, -1);
        open = std::ssize(message["content"]);
        EXPECT_EQ(event["index"], open);
        message["content"].push_back(event["content_block"]);
        if (event["content_block"]["type"] == "tool_use") message["content"].back()["input"] = "";
      } else if (type == "content_block_delta") {
        EXPECT_EQ(event["index"], open);
        add_delta(event["delta"], message["content"].back());
      } else if (type == "content_block_stop") {
        EXPECT_EQ(event["index"], std::exchange(open, -1));
      } else if (type == "message_delta") {
        message.update(event["delta"]);
        message["usage"].update(event["usage"]);
      } else {
        EXPECT_TRUE(type == "ping" || type == "message_stop") << type;
      }
    }
    return message;
  }
  static void add_delta(const json& delta, json& block) {
    for (const auto& [from, into] : {std::pair{"text", "text"}, std::pair{"thinking", "thinking"},
                                     std::pair{"signature", "signature"}, std::pair{"partial_json", "input"}}) {
      if (!delta.contains(from)) continue;
      block[into] = block[into].get<std::string>() + delta[from].get<std::string>();
    }
  }
};

TEST_F(ServiceMessagesTest, AMessageHasTextAndUsage) {
  start("Hello$");
  engine_->cached = 3;
  const auto reply = post("/v1/messages", ask_of({{"system", "s"}}));
  EXPECT_TRUE(reply["id"].get<std::string>().starts_with("msg_"));
  EXPECT_EQ(reply["type"], "message");
  EXPECT_EQ(reply["role"], "assistant");
  EXPECT_EQ(reply["model"], "fake");
  EXPECT_EQ(reply["content"], json::parse(R"([{"type": "text", "text": "Hello"}])"));
  EXPECT_EQ(reply["stop_reason"], "end_turn");
  EXPECT_EQ(reply["stop_sequence"], nullptr);
  const auto prompt = engine_->last().prompt.size();
  EXPECT_EQ(reply["usage"], json({{"input_tokens", prompt - 3},
                                  {"cache_read_input_tokens", 3},
                                  {"cache_creation_input_tokens", 0},
                                  {"output_tokens", 6}}));
  EXPECT_EQ(post("/v1/messages/count_tokens", {{"messages", ask_of()["messages"]}, {"system", "s"}}),
            json({{"input_tokens", prompt}}));
}

TEST_F(ServiceMessagesTest, AStreamMakesTheSameMessage) {
  if (!start_with(kTools, kReply)) GTEST_SKIP() << "python3 or jinja2 is missing";
  engine_->cached = 5;
  const auto body = ask_of({{"tools", tools()}, {"tool_choice", {{"type", "auto"}}}});
  auto whole = post("/v1/messages", body);
  ASSERT_EQ(whole["content"].size(), 3U);
  EXPECT_EQ(whole["content"][0], json({{"type", "thinking"}, {"thinking", "why"}, {"signature", ""}}));
  EXPECT_EQ(whole["content"][1], json({{"type", "text"}, {"text", "I look."}}));
  auto& call = whole["content"][2];
  EXPECT_TRUE(call["id"].get<std::string>().starts_with("toolu_"));
  EXPECT_EQ(call["name"], "get");
  EXPECT_EQ(call["input"], json({{"days", 3}}));
  EXPECT_EQ(whole["stop_reason"], "tool_use");
  EXPECT_EQ(whole["usage"]["output_tokens_details"]["thinking_tokens"], 12);  // up to the end of </think>
  auto message = streamed(body);
  message["content"][2]["input"] = json::parse(message["content"][2]["input"].get<std::string>());
  for (const char* name : {"id", "usage"}) EXPECT_EQ(message[name].type(), whole[name].type());
  message["id"] = whole["id"];
  message["content"][2]["id"] = call["id"];
  EXPECT_EQ(message, whole);
}

TEST_F(ServiceMessagesTest, AConversationIsTheSameAsAChats) {
  if (!start_with(kConversation, "a</think>b$")) GTEST_SKIP() << "python3 or jinja2 is missing";
  const auto body = json::parse(R"({"max_tokens": 100, "tools": [{"name": "get", "input_schema": {"b": 1, "a": {}}}],
      "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                 {"type": "text", "text": "t"}],
      "messages": [
        {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v", "citations": null}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "why", "signature": ""},
          {"type": "text", "text": "look"}, {"type": "tool_use", "id": "1", "name": "get", "input": {"z": 1, "y": 2}},
          {"type": "tool_use", "id": "2", "name": "get", "input": {}}]},
        {"role": "user", "content": [
          {"type": "tool_result", "tool_use_id": "1", "content": "rain"},
          {"type": "tool_result", "tool_use_id": "2", "is_error": true, "content": [{"type": "text", "text": "bad"}]},
          {"type": "text", "text": "and", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "w"}, {"type": "tool_result", "tool_use_id": "3"}]},
        {"role": "user", "content": []}]})");
  // nlohmann::json sorts names; the order of a call's input is the client's.
  auto text = body.dump();
  const std::string sorted = R"({"y":2,"z":1})";
  text.replace(text.find(sorted), sorted.size(), R"({"z":1,"y":2})");
  EXPECT_EQ(status_of(ask("POST", "/v1/messages", text)), 200);
  EXPECT_EQ(prompt(),
            R"([{"type": "function", "function": {"name": "get", "parameters": {"a": {}, "b": 1}}}])"
            R"(<system>/st<user>/uv<assistant>why/look[1 get {"z": 1, "y": 2}][2 get {}]<tool>/rain1<tool>/bad2)"
            R"(<user>/and<user>/w<tool>/3<user>/<assistant><think>)");
  EXPECT_EQ(engine_->last().cache_after.size(), 2U);
}

TEST_F(ServiceMessagesTest, ThinkingIsAVariableOfTheTemplate) {
  if (!start_with(kConversation, "a</think>b$")) GTEST_SKIP() << "python3 or jinja2 is missing";
  for (const auto& [type, shown] :
       {std::pair{"enabled", "True"}, std::pair{"adaptive", "True"}, std::pair{"disabled", "False"}}) {
    post("/v1/messages", ask_of({{"thinking", {{"type", type}}}}));
    EXPECT_EQ(prompt(), std::string("<user>/a") + shown + "<assistant><think>");
  }
  EXPECT_NE(refusal(ask_of({{"thinking", {{"type", "x"}}}}))["message"].get<std::string>().find("thinking.type"),
            std::string::npos);
  stop(0ms);
  options_.chat = load_chat_template("plain");  // which has no reasoning to bound
  tokenizer_ = data::load_tokenizer("bytes");
  start("Hello$");
  post("/v1/messages", ask_of({{"thinking", {{"type", "enabled"}}}}));
}

TEST_F(ServiceMessagesTest, AnAssistantsMessageAtTheEndIsContinued) {
  if (!start_with(kChatml, "lo$")) GTEST_SKIP() << "python3 or jinja2 is missing";
  auto body = ask_of();
  body["messages"].push_back({{"role", "assistant"}, {"content", "Hel"}});
  EXPECT_EQ(post("/v1/messages", body)["content"][0]["text"], "lo");
  EXPECT_EQ(prompt(), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nHel");
}

TEST_F(ServiceMessagesTest, SaysWhyAReplyEnded) {
  if (!start_with(kTools, kReply)) GTEST_SKIP() << "python3 or jinja2 is missing";
  const auto stopped = post("/v1/messages", ask_of({{"stop_sequences", {"x", "look"}}}));
  EXPECT_EQ(stopped["stop_reason"], "stop_sequence");
  EXPECT_EQ(stopped["stop_sequence"], "look");
  EXPECT_EQ(stopped["content"][1]["text"], "I ");
  EXPECT_EQ(post("/v1/messages", ask_of({{"max_tokens", 20}}))["stop_reason"], "max_tokens");
  const auto nothing = post("/v1/messages", ask_of({{"max_tokens", 0}}));
  EXPECT_EQ(nothing["content"], json::array());
  EXPECT_EQ(streamed(ask_of({{"max_tokens", 0}}))["content"], json::array());
}

TEST_F(ServiceMessagesTest, MoreTokensThanTheServersLimitCountAsTheLimit) {
  options_.max_tokens = 7;
  start("Hello");
  const auto reply = post("/v1/messages", ask_of({{"max_tokens", 32000}}));
  EXPECT_EQ(reply["usage"]["output_tokens"], 7);
  EXPECT_EQ(reply["stop_reason"], "max_tokens");
}

TEST_F(ServiceMessagesTest, ACallThatIsCutOffHasItsCompleteMembers) {
  const std::string call = "<tool_call>\n<function=get>\n<parameter=city>\nZug\n</parameter>\n<parameter=days>\n3";
  if (!start_with(kTools, "why</think>" + call)) GTEST_SKIP() << "python3 or jinja2 is missing";
  const auto most = std::string("why</think>").size() + call.size();
  const auto cut = post("/v1/messages", ask_of({{"tools", tools()}, {"max_tokens", most}}));
  EXPECT_EQ(cut["stop_reason"], "max_tokens");
  ASSERT_EQ(cut["content"].size(), 2U);
  EXPECT_EQ(cut["content"][1]["input"], json({{"city", "Zug"}}));
}

TEST_F(ServiceMessagesTest, ToolsMayBeLeftOut) {
  if (!start_with(kTools, kReply)) GTEST_SKIP() << "python3 or jinja2 is missing";
  const auto none = post("/v1/messages", ask_of({{"tools", tools()}, {"tool_choice", {{"type", "none"}}}}));
  EXPECT_EQ(none["stop_reason"], "end_turn");
  EXPECT_EQ(prompt().find("function"), std::string::npos);
  stop(0ms);
  const std::string twice =
      std::string(kReply, std::string(kReply).size() - 1) + "\n<tool_call>\n<function=get>\n</function>\n</tool_call>$";
  start_with(kTools, twice);
  EXPECT_EQ(post("/v1/messages", ask_of({{"tools", tools()}}))["content"].size(), 4U);
  const json one{{"type", "auto"}, {"disable_parallel_tool_use", true}};
  EXPECT_EQ(post("/v1/messages", ask_of({{"tools", tools()}, {"tool_choice", one}}))["content"].size(), 3U);
}

TEST_F(ServiceMessagesTest, RefusesByNameInAnthropicsShape) {
  start("Hello$");
  const auto refused = [&](const json& more, const std::string& sentence) {
    const auto error = refusal(ask_of(more));
    EXPECT_EQ(error["type"], "invalid_request_error");
    EXPECT_NE(error["message"].get<std::string>().find(sentence), std::string::npos) << error;
  };
  const auto blocks = [](const std::string& role, const std::string& list) {
    return json{{"messages", {{{"role", role}, {"content", json::parse(list)}}}}};
  };
  refused({{"messages", json::array()}}, "messages: got []");
  refused(blocks("user", R"([{"type": "image", "source": {}}])"), "messages[0].content[0].type: got \"image\"");
  refused(blocks("user", R"([{"type": "document"}])"), "messages[0].content[0].type: got \"document\"");
  refused(blocks("assistant", R"([{"type": "redacted_thinking"}])"), "got \"redacted_thinking\"");
  refused(blocks("user", R"([{"type": "tool_use"}])"), "expected text or tool_result");
  refused(blocks("assistant", R"([{"type": "tool_use", "id": "1", "name": "a", "input": "b"}])"), "content[0].input");
  refused(blocks("user", R"([{"type": "text", "text": "a", "x": 1}])"), "messages[0].content[0].x");
  refused(blocks("tool", R"("a")"), "messages[0].role: got \"tool\"");
  refused({{"tools", {{{"type", "web_search_20250305"}, {"name", "web_search"}}}}}, "tools[0].type");
  refused({{"tool_choice", {{"type", "all"}}}}, "tool_choice.type");
  refused({{"tool_choice", {{"type", "any"}}}}, "tool_choice: got a call of a tool");
  refused({{"stop", "a"}}, "stop: got");
  refused({{"output_config", {{"effort", "low"}}}}, "output_config.effort: got \"low\"");
  refused({{"output_config", {{"format", {{"type", "json_schema"}, {"schema", 1}}}}}}, "output_config.format.schema");
  refused({{"stop_sequences", {""}}}, "stop_sequences");
  refused({{"mcp_servers", {1}}}, "mcp_servers");
  refused({{"thinking", {{"type", "enabled"}, {"budget_tokens", 0}}}}, "thinking.budget_tokens");
  EXPECT_EQ(refusal(ask_of({{"thread", {{"type", "create"}}}}))["details"]["error_code"], "thread_unsupported_request");
  EXPECT_EQ(refusal(ask_of({{"model", "other"}}), 404)["type"], "not_found_error");
  EXPECT_EQ(refusal({{"max_tokens", 1}}, 400, "/v1/messages/count_tokens")["type"], "invalid_request_error");
  EXPECT_EQ(json::parse(body_of(ask("GET", "/v1/messages")))["type"], "error");
  // What this API's clients send without a wish that the server cannot fulfil.
  post("/v1/messages?beta=true", ask_of({{"metadata", {{"user_id", "u"}}}, {"service_tier", "auto"}}));
}

TEST_F(ServiceMessagesTest, AFullQueueHasAStatusAndALateErrorAnEvent) {
  start("Hello");
  engine_->max_queue = 0;
  EXPECT_EQ(refusal(ask_of({{"stream", true}}), 429)["type"], "rate_limit_error");
  engine_->max_queue = 10;
  engine_->step = 5ms;
  HttpClient client(port_);
  client.send_post("/v1/messages", ask_of({{"stream", true}}).dump());
  EXPECT_TRUE(soon([&] { return engine_->steps > 3; }));
  stop(0ms);
  const auto text = client.read_all();
  EXPECT_NE(text.find("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\""),
            std::string::npos)
      << text;
}

TEST_F(ServiceMessagesTest, AKeyMayComeAlone) {
  keys_ = Keys({"secret"});
  start("Hello$");
  const auto with = [&](const std::string& fields) {
    return ask("POST", "/v1/messages", ask_of().dump(), "Content-Type: application/json\r\n" + fields);
  };
  EXPECT_EQ(status_of(with("x-api-key: secret\r\n")), 200);
  EXPECT_EQ(status_of(with("Authorization: Bearer secret\r\n")), 200);
  EXPECT_EQ(status_of(with("Authorization: Bearer wrong\r\nx-api-key: secret\r\n")), 401);
  const auto refused = with("x-api-key: wrong\r\n");
  EXPECT_EQ(status_of(refused), 401);
  EXPECT_EQ(json::parse(body_of(refused))["error"]["type"], "authentication_error");
}

}  // namespace
}  // namespace efla::serve
