// The API over real sockets: sessions, stored responses and states that travel with requests.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "efla/serve/api/base64.h"
#include "tests/serve/service_fixture.h"
#include "tests/support/http_client.h"

namespace efla::serve {
namespace {

TEST_F(ServiceTest, ResponsesContinueStoredStates) {
  start("Hello\nUser:");
  const auto first = post("/v1/responses", {{"input", "Hi"}, {"instructions", "Be."}, {"seed", 0}});
  EXPECT_EQ(first["status"], "completed");
  EXPECT_EQ(first["output"][0]["content"][0]["text"], "Hello");
  const std::string id = first["id"];
  // The stored text ends as a turn ends, whatever ended the reply.
  const auto stored = engine_->text_of(id);
  EXPECT_TRUE(stored.starts_with("Be.\n\nUser: Hi\nAssistant:")) << stored;
  EXPECT_TRUE(stored.ends_with("\n")) << stored;
  EXPECT_EQ(stored.find("\nUser:", 20), std::string::npos) << stored;
  const auto second = post("/v1/responses", {{"input", "More"}, {"previous_response_id", id}});
  EXPECT_EQ(second["previous_response_id"], id);
  EXPECT_TRUE(engine_->text_of(second["id"]).starts_with(stored + "User: More\nAssistant:"));
  EXPECT_EQ(engine_->text_of(id), stored);  // several responses can follow one
  EXPECT_EQ(post("/v1/responses", {{"input", "x"}, {"previous_response_id", "resp_0"}}, 404)["error"]["code"],
            "not_found");
  const auto unstored = post("/v1/responses", {{"input", "x"}, {"store", false}});
  EXPECT_EQ(engine_->stored(), 2U);
  EXPECT_EQ(status_of(ask("DELETE", "/v1/responses/" + id)), 200);
  EXPECT_EQ(status_of(ask("DELETE", "/v1/responses/" + id)), 404);
  EXPECT_EQ(engine_->stored(), 1U);
  post("/v1/sessions", {{"name", "book"}, {"prompt", "A text."}}, 201);
  EXPECT_EQ(status_of(ask("DELETE", "/v1/responses/book")), 404) << "not a response";
  EXPECT_EQ(engine_->stored(), 2U);
}

TEST_F(ServiceTest, TheStateOfARefusedRequestIsFreed) {
  start();
  engine_->max_queue = 0;
  post("/v1/completions", {{"prompt", "x"}, {"state", to_base64("state:A")}}, 429);
  EXPECT_TRUE(soon([&] { return engine_->held_texts() == 0; }));
}

TEST_F(ServiceTest, SessionsAreNoResponses) {
  start("Hello$");
  const auto after = [&](const std::string& previous, int status) {
    return post("/v1/responses", {{"input", "x"}, {"previous_response_id", previous}}, status)["error"]["param"];
  };
  EXPECT_EQ(after("_0", 400), "previous_response_id");
  EXPECT_EQ(after("../book", 400), "previous_response_id");
  for (const std::string name : {"book", "resp_1"}) {
    post("/v1/sessions", {{"name", name}, {"prompt", "A"}}, 201);
    EXPECT_EQ(after(name, 404), "previous_response_id");
    EXPECT_EQ(status_of(ask("DELETE", "/v1/responses/" + name)), 404);
  }
  post("/v1/completions", {{"prompt", "A"}, {"save_as", "saved"}});
  EXPECT_TRUE(engine_->take_disposable().empty());
  post("/v1/completions", {{"prompt", "A"}, {"save_as", "saved"}, {"disposable", true}});
  EXPECT_EQ(engine_->take_disposable(), std::vector<std::string>{"saved"});
  const std::string id = post("/v1/responses", {{"input", "Hi"}})["id"];
  EXPECT_EQ(engine_->take_disposable(), std::vector<std::string>{id});
}

TEST_F(ServiceTest, Sessions) {
  start();
  EXPECT_EQ(post("/v1/sessions", {{"name", "book"}, {"prompt", "Once"}}, 201)["tokens"], 4);
  EXPECT_EQ(post("/v1/sessions/book/fork", {{"name", "copy"}}, 201)["name"], "copy");
  EXPECT_EQ(post("/v1/sessions", {{"name", "copy"}, {"prompt", "lost"}}, 400)["error"]["param"], "name");
  EXPECT_EQ(post("/v1/sessions/book/fork", {{"name", "copy"}}, 400)["error"]["param"], "name");
  EXPECT_EQ(post("/v1/sessions", {{"name", "longer"}, {"parent", "book"}, {"prompt", " upon"}}, 201)["tokens"], 9);
  EXPECT_EQ(post("/v1/sessions", {{"name", "same"}, {"parent", "book"}}, 201)["tokens"], 4);
  for (const json& more : {json::object(), json{{"prompt", "a"}}}) {
    json orphan{{"name", "orphan"}, {"parent", "none"}};
    orphan.update(more);
    const auto error = post("/v1/sessions", orphan, 404)["error"];
    EXPECT_EQ(error["param"], "parent");
    EXPECT_EQ(error["code"], "session_not_found");
    EXPECT_EQ(error["message"], "parent: got 'none', expected a stored session");
  }
  const auto itself = post("/v1/sessions", {{"name", "book"}, {"parent", "book"}}, 400)["error"];
  EXPECT_EQ(itself["param"], "name");
  EXPECT_EQ(itself["message"], "name: got \"book\", which exists, expected a new name");
  EXPECT_EQ(post("/v1/completions",
                 {{"session", "book"}, {"save_as", "book"}, {"max_tokens", 2}, {"seed", 0}})["choices"][0]["text"],
            "ab");
  EXPECT_EQ(engine_->text_of("book"), "Onceab");
  EXPECT_EQ(engine_->text_of("copy"), "Once");
  EXPECT_EQ(post("/v1/sessions/book/rewind", {{"tokens", 1}})["tokens"], 5);
  EXPECT_EQ(get("/v1/sessions/book")["bytes"], 1000);
  EXPECT_EQ(get("/v1/sessions")["data"].size(), 4U);
  const auto state = ask("GET", "/v1/sessions/book/state");
  EXPECT_EQ(body_of(state), "state:Oncea");
  EXPECT_EQ(status_of(ask("PUT", "/v1/sessions/loaded/state", body_of(state), "")), 200);
  EXPECT_EQ(engine_->text_of("loaded"), "Oncea");
  const auto rubbish = ask("PUT", "/v1/sessions/loaded/state", "rubbish", "");
  EXPECT_EQ(status_of(rubbish), 400);
  EXPECT_EQ(json::parse(body_of(rubbish))["error"]["param"], "state");
  EXPECT_EQ(status_of(ask("DELETE", "/v1/sessions/book")), 200);
  const auto missing = get("/v1/sessions/book", 404)["error"];
  EXPECT_EQ(missing["code"], "session_not_found");
  EXPECT_EQ(post("/v1/completions", {{"session", "book"}}, 404)["error"], missing);
  EXPECT_EQ(status_of(ask("GET", "/v1/sessions/_0")), 400);
}

TEST_F(ServiceTest, StatesTravelWithRequests) {
  start();
  const auto first =
      post("/v1/completions", {{"prompt", "Hi"}, {"max_tokens", 2}, {"seed", 0}, {"return_state", true}});
  EXPECT_EQ(from_base64(first["state"].get<std::string>()), "state:Hiab");
  const auto second =
      post("/v1/completions", {{"state", first["state"]}, {"max_tokens", 1}, {"seed", 0}, {"return_state", true}});
  EXPECT_EQ(from_base64(second["state"].get<std::string>()), "state:Hiaba");
  EXPECT_EQ(engine_->stored(), 0U);
  EXPECT_TRUE(soon([&] { return engine_->held_texts() == 0; }));
  const auto events =
      stream("/v1/completions", {{"prompt", "x"}, {"max_tokens", 1}, {"stream", true}, {"return_state", true}});
  EXPECT_TRUE(events.back().contains("state"));
  const auto rubbish = post("/v1/completions", {{"prompt", "x"}, {"state", to_base64("rubbish")}}, 400)["error"];
  EXPECT_EQ(rubbish["type"], "invalid_request_error");
  EXPECT_EQ(rubbish["param"], "state");
  EXPECT_EQ(rubbish["message"], "state: at byte 3: not a session");  // without the engine's name for it
  const auto other = post("/v1/completions", {{"prompt", "x"}, {"state", to_base64("other")}}, 400)["error"];
  EXPECT_EQ(other["param"], "state");
  EXPECT_EQ(other["message"], "state: got a state of another model, expected one of this model");
}

TEST_F(ServiceTest, ARewindKeepsNobodyWaitingAndEndsWhenItsClientLeaves) {
  start();
  post("/v1/sessions", {{"name", "book"}, {"prompt", "Once"}}, 201);
  EXPECT_EQ(post("/v1/sessions/book/rewind", {{"tokens", 0}})["tokens"], 4);
  EXPECT_EQ(post("/v1/sessions/book/rewind", {{"tokens", 5}}, 400)["error"]["param"], "tokens");
  engine_->prefill = 60'000ms;
  HttpClient client(port_);
  client.send_post("/v1/sessions/book/rewind", R"({"tokens": 1})");
  EXPECT_TRUE(soon([&] { return engine_->statistics().running == 1; }));
  engine_->prefill = 0ms;
  post("/v1/completions", {{"prompt", "a"}});
  client.close();
  EXPECT_TRUE(soon([&] { return engine_->cancelled == 1; }));
  EXPECT_EQ(engine_->text_of("book"), "Once");
  engine_->prefill = 60'000ms;
  HttpClient last(port_);
  last.send_post("/v1/sessions/book/rewind", R"({"tokens": 1})");
  EXPECT_TRUE(soon([&] { return engine_->statistics().running == 1; }));
  stop(0ms);
  EXPECT_EQ(engine_->cancelled, 2);
}

}  // namespace
}  // namespace efla::serve
