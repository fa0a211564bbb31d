// Replies of a form that the request gives.
#include <gtest/gtest.h>

#include "tests/serve/service_fixture.h"

namespace efla::serve {
namespace {

class ServiceFormTest : public ServiceTest {
 protected:
  void SetUp() override {
    if (!GrammarCompiler::unavailable().empty()) GTEST_SKIP() << GrammarCompiler::unavailable();
  }
  std::string message(const json& reply) { return reply["choices"][0]["message"]["content"]; }

  const json messages_ = {{{"role", "user"}, {"content", "a"}}};
};

const json kSchema = json::parse(R"({"type": "object", "properties": {"kind": {"enum": ["ok", "no"]},
    "count": {"type": "integer", "minimum": 2, "maximum": 3}}, "required": ["kind", "count"]})");

TEST_F(ServiceFormTest, RepliesFollowTheirSchema) {
  start(R"({"count":3,"kind":"xo"}$)");
  const json format = {{"type", "json_schema"}, {"json_schema", {{"name", "n"}, {"schema", kSchema}}}};
  const json body = {{"messages", messages_}, {"response_format", format}, {"seed", 0}};
  const auto reply = post("/v1/chat/completions", body);
  EXPECT_EQ(reply["choices"][0]["finish_reason"], "stop");
  const auto value = json::parse(message(reply));
  EXPECT_EQ(value, json::parse(R"({"count": 3, "kind": "no"})"));
  auto streamed = body;
  streamed["stream"] = true;
  std::string text;
  for (const auto& event : stream("/v1/chat/completions", streamed)) {
    if (event["choices"][0]["delta"].contains("content")) {
      text += event["choices"][0]["delta"]["content"].get<std::string>();
    }
  }
  EXPECT_EQ(text, message(reply));
  const json text_format = {{"type", "json_schema"}, {"name", "n"}, {"schema", kSchema}};
  const auto response = post("/v1/responses", {{"input", "a"}, {"text", {{"format", text_format}}}, {"seed", 0}});
  EXPECT_EQ(response["output"][0]["content"][0]["text"], message(reply));
  EXPECT_EQ(response["text"]["format"]["type"], "json_schema");
}

TEST_F(ServiceFormTest, CompletionsFollowChoicesAndExpressions) {
  start("zzzz");
  const auto completion = [&](const json& outputs) {
    const auto reply =
        post("/v1/completions", {{"prompt", "a"}, {"structured_outputs", outputs}, {"seed", 0}, {"n", 2}});
    EXPECT_EQ(reply["choices"][0]["text"], reply["choices"][1]["text"]);
    EXPECT_EQ(reply["choices"][0]["finish_reason"], "stop");
    return reply["choices"][0]["text"].get<std::string>();
  };
  EXPECT_EQ(completion({{"choice", {"yes", "no"}}}), "no");
  EXPECT_EQ(completion({{"regex", "z{2}y"}}), "zzy");
  EXPECT_EQ(completion({{"grammar", "root ::= \"z\" other\nother ::= \"xy\""}}), "zxy");
}

TEST_F(ServiceFormTest, RefusesWhatIsNoGrammar) {
  start();
  const auto error =
      post("/v1/completions", {{"prompt", "a"}, {"structured_outputs", {{"regex", "(a"}}}}, 400)["error"];
  EXPECT_EQ(error["param"], "structured_outputs.regex");
  EXPECT_TRUE(error["message"].get<std::string>().starts_with("structured_outputs.regex: ")) << error;
  EXPECT_EQ(engine_->submitted(), 0);
}

}  // namespace
}  // namespace efla::serve
