// The API over real sockets: replies, streams, errors and limits.
#include "efla/serve/api/service.h"

#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "efla/serve/api/base64.h"
#include "tests/serve/service_fixture.h"
#include "tests/support/http_client.h"

namespace efla::serve {
namespace {

TEST_F(ServiceTest, Completions) {
  start();
  const auto reply = post("/v1/completions", {{"model", "fake"}, {"prompt", "Hi"}, {"max_tokens", 3}, {"seed", 0}});
  EXPECT_TRUE(reply["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(reply["object"], "text_completion");
  EXPECT_EQ(reply["model"], "fake");
  EXPECT_EQ(reply["choices"],
            json::parse(R"([{"index": 0, "text": "abc", "logprobs": null, "finish_reason": "length"}])"));
  EXPECT_EQ(reply["usage"]["prompt_tokens"], 2);
  EXPECT_EQ(reply["usage"]["completion_tokens"], 3);
  EXPECT_EQ(reply["usage"]["total_tokens"], 5);
  EXPECT_EQ(post("/v1/completions", {{"prompt", "Hi"}, {"seed", 0}, {"stop", "ef"}})["choices"][0]["text"], "abcd");
  EXPECT_EQ(post("/v1/completions", {{"prompt", {72, 105}}, {"max_tokens", 1}, {"seed", 2}})["choices"][0]["text"],
            "c");
  EXPECT_EQ(engine_->last().prompt, (std::vector<std::int32_t>{72, 105}));
}

TEST_F(ServiceTest, ListsAndSeveralRepliesInOrder) {
  start();
  const auto lists = post("/v1/completions", {{"prompt", {"a", "bc"}}, {"max_tokens", 2}, {"seed", 0}});
  ASSERT_EQ(lists["choices"].size(), 2U);
  EXPECT_EQ(lists["usage"]["prompt_tokens"], 3);
  const auto several = post("/v1/completions", {{"prompt", {"x", "yz"}}, {"n", 3}, {"max_tokens", 2}, {"seed", 1}});
  ASSERT_EQ(several["choices"].size(), 6U);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(several["choices"][i]["index"], i);
    EXPECT_EQ(several["choices"][i]["text"], std::string("bcdef").substr(i % 3, 2));
  }
  EXPECT_EQ(several["usage"]["prompt_tokens"], 3);  // each prompt is prefilled once
  EXPECT_EQ(several["usage"]["completion_tokens"], 12);
  EXPECT_TRUE(soon([&] { return engine_->stored() == 0; }));
}

TEST_F(ServiceTest, LogprobsAndEcho) {
  start();
  const auto reply =
      post("/v1/completions", {{"prompt", "xyz"}, {"echo", true}, {"logprobs", 1}, {"max_tokens", 1}, {"seed", 0}});
  const auto& choice = reply["choices"][0];
  EXPECT_EQ(choice["text"], "xyza");
  EXPECT_EQ(choice["logprobs"]["tokens"], json({"x", "y", "z", "a"}));
  EXPECT_EQ(choice["logprobs"]["token_logprobs"], json({nullptr, -0.25, -0.25, -0.5}));
  EXPECT_EQ(choice["logprobs"]["top_logprobs"][0], nullptr);
  EXPECT_EQ(choice["logprobs"]["top_logprobs"][3], json({{"a", -0.5}}));
  EXPECT_EQ(choice["logprobs"]["text_offset"], json({0, 1, 2, 3}));
  const auto none = post("/v1/completions", {{"prompt", "xyz"}, {"echo", true}, {"logprobs", 0}, {"max_tokens", 0}});
  EXPECT_EQ(none["choices"][0]["text"], "xyz");
  EXPECT_EQ(none["choices"][0]["logprobs"]["tokens"].size(), 3U);
  const auto streamed =
      stream("/v1/completions",
             {{"prompt", "xy"}, {"echo", true}, {"logprobs", 1}, {"max_tokens", 2}, {"seed", 0}, {"stream", true}});
  EXPECT_EQ(streamed[0]["choices"][0]["text"], "xy");
  EXPECT_EQ(streamed[0]["choices"][0]["logprobs"]["tokens"], json({"x", "y"}));
  EXPECT_EQ(streamed[2]["choices"][0]["logprobs"]["token_logprobs"], json({-0.5}));
}

TEST_F(ServiceTest, AStreamIsTheWholeReplyWithItsLogprobs) {
  start("z\xc3\xa4\x80");
  for (const bool echo : {false, true}) {
    for (const int n : {1, 2}) {
      json body{
          {"prompt", {"x\xc3\xb6y", "z"}}, {"echo", echo}, {"n", n}, {"max_tokens", 5}, {"logprobs", 1}, {"seed", 0}};
      const auto whole = post("/v1/completions", body)["choices"];
      const auto joined = joined_stream(body, whole.size());
      for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(joined[i]["logprobs"], whole[i]["logprobs"]) << i;
    }
  }
}

TEST_F(ServiceTest, TokensThatAreHalfACharacter) {
  start("\xc3\xa4");
  const auto reply = post("/v1/completions", {{"prompt", "x"}, {"logprobs", 0}, {"max_tokens", 2}, {"seed", 0}});
  EXPECT_EQ(reply["choices"][0]["logprobs"]["tokens"], json({"bytes:\\xc3", "bytes:\\xa4"}));
}

TEST_F(ServiceTest, OffsetsOfTokensCountBytesThatBelongToNoCharacter) {
  start("\x80\xc3x\xe2\x80y\xc3\xa4z");
  const auto reply = post("/v1/completions", {{"prompt", "x"}, {"logprobs", 0}, {"max_tokens", 9}, {"seed", 0}});
  EXPECT_EQ(reply["choices"][0]["logprobs"]["text_offset"], json({0, 1, 2, 3, 4, 4, 5, 6, 6}));
}

TEST_F(ServiceTest, Streams) {
  start();
  const auto events = stream("/v1/completions", {{"prompt", "Hi"},
                                                 {"max_tokens", 3},
                                                 {"seed", 0},
                                                 {"stream", true},
                                                 {"stream_options", {{"include_usage", true}}}});
  ASSERT_EQ(events.size(), 5U);
  std::string text;
  for (int i = 0; i < 3; ++i) text += events[i]["choices"][0]["text"].get<std::string>();
  EXPECT_EQ(text, "abc");
  EXPECT_EQ(events[0]["choices"][0]["finish_reason"], nullptr);
  EXPECT_EQ(events[3]["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(events[4]["choices"], json::array());
  EXPECT_EQ(events[4]["usage"]["completion_tokens"], 3);
  const auto several =
      stream("/v1/completions", {{"prompt", "Hi"}, {"n", 2}, {"max_tokens", 2}, {"seed", 0}, {"stream", true}});
  std::map<int, std::string> texts;
  for (const auto& event : several)
    texts[event["choices"][0]["index"]] += event["choices"][0]["text"].get<std::string>();
  EXPECT_EQ(texts, (std::map<int, std::string>{{0, "ab"}, {1, "bc"}}));
}

TEST_F(ServiceTest, Chat) {
  start("Hello\nUser:");
  const json body{{"messages", {{{"role", "user"}, {"content", "Hi"}}}}, {"seed", 0}};
  const auto reply = post("/v1/chat/completions", body);
  EXPECT_EQ(reply["object"], "chat.completion");
  EXPECT_EQ(reply["choices"][0]["message"]["content"], "Hello");
  EXPECT_EQ(reply["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(reply["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(engine_->last().max_tokens, options_.max_tokens);
  auto scored = body;
  scored.update({{"logprobs", true}, {"top_logprobs", 2}, {"max_tokens", 1}});
  const auto token = post("/v1/chat/completions", scored)["choices"][0]["logprobs"]["content"][0];
  EXPECT_EQ(token["token"], "H");
  EXPECT_EQ(token["bytes"], json({72}));
  EXPECT_EQ(token["top_logprobs"].size(), 2U);
  auto streamed = body;
  streamed["stream"] = true;
  const auto events = stream("/v1/chat/completions", streamed);
  EXPECT_EQ(events.front()["choices"][0]["delta"], json({{"role", "assistant"}, {"content", ""}}));
  EXPECT_EQ(events.front()["object"], "chat.completion.chunk");
  EXPECT_EQ(events[1]["choices"][0]["delta"]["content"], "Hello");
  EXPECT_EQ(events.back()["choices"][0]["finish_reason"], "stop");
  const auto robot = [&](const std::string& path, const std::string& field) {
    const json messages{{{"role", "user"}, {"content", "a"}}, {{"role", "robot"}, {"content", "b"}}};
    const auto error = post(path, {{field, messages}}, 400)["error"];
    EXPECT_EQ(error["param"], field + "[1].role");
    EXPECT_EQ(error["message"], field + "[1].role: got \"robot\", expected one of assistant, system, user");
  };
  robot("/v1/chat/completions", "messages");
  robot("/v1/responses", "input");
}

TEST_F(ServiceTest, AHistoryHasTheTextOfTheSession) {
  start(" Hello\nUser:");
  json messages{{{"role", "user"}, {"content", "Hi"}}};
  const auto reply = post("/v1/chat/completions", {{"messages", messages}, {"seed", 0}, {"save_as", "chat"}});
  messages.push_back(reply["choices"][0]["message"]);
  EXPECT_EQ(messages.back()["content"], " Hello");
  const auto end = engine_->text_of("chat");
  post("/v1/chat/completions", {{"messages", messages}});
  EXPECT_EQ(engine_->info().tokenizer->decode(engine_->last().prompt), end + "Assistant:");
}

TEST_F(ServiceTest, ClientsSayWhereAPromptIsWorthRoomInTheCache) {
  start();
  const auto text = [](const std::string& content) {
    return json{{"type", "text"}, {"text", content}, {"cache_control", {{"type", "ephemeral"}}}};
  };
  post("/v1/chat/completions", {{"messages",
                                 {{{"role", "system"}, {"content", {text("Be.")}}},
                                  {{"role", "user"}, {"content", "Hi"}},
                                  {{"role", "user"}, {"content", {text("Ho")}}}}}});
  EXPECT_EQ(engine_->last().cache_after, (std::vector<std::int64_t>{5, 5 + 9 + 9}));  // "Be.\n\n", "User: Hi\n"
  post("/v1/completions", {{"prompt", "Hi"}, {"cache_tokens", 128}});
  EXPECT_EQ(engine_->last().cache_after, (std::vector<std::int64_t>{128}));
}

TEST_F(ServiceTest, AFullQueueLosesNoReplyThatIsFinished) {
  start("Hello\nUser:");
  engine_->prefill = 100ms;
  const auto fills = [&](const std::string& path, const json& body) {
    EXPECT_TRUE(soon([&] { return engine_->statistics().running == 0; }));  // also the request before
    std::thread filler([&] {
      EXPECT_TRUE(soon([&] { return engine_->statistics().running > 0; }));
      engine_->max_queue = 0;
    });
    const auto reply = post(path, body);
    filler.join();
    engine_->max_queue = 10;
    return reply;
  };
  const auto stored = fills("/v1/responses", {{"input", "Hi"}, {"seed", 0}});
  EXPECT_EQ(stored["output"][0]["content"][0]["text"], "Hello");
  EXPECT_TRUE(engine_->text_of(stored["id"]).ends_with("Assistant:Hello\n"));
  const auto several = fills("/v1/completions", {{"prompt", {"x", "yz"}}, {"n", 3}, {"max_tokens", 2}, {"seed", 1}});
  EXPECT_EQ(several["choices"].size(), 6U);
  // All replies have a place in the queue, or none.
  EXPECT_EQ(post("/v1/completions", {{"prompt", {"x", "yz"}}, {"n", 6}}, 429)["error"]["code"], "queue_full");
  // More replies than may ever wait are the client's mistake.
  const auto refused =
      post("/v1/completions", {{"prompt", std::vector<std::string>(8, "x")}, {"n", 128}}, 400)["error"];
  EXPECT_EQ(refused["param"], "n");
  EXPECT_EQ(refused["message"], "n: got 1024 replies in all, expected at most the 1000 that may wait");
}

TEST_F(ServiceTest, ResponsesStream) {
  start("Hello$");
  const auto events = stream("/v1/responses", {{"input", "Hi"}, {"stream", true}, {"seed", 0}}, false);
  std::vector<std::string> types;
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i]["sequence_number"], i);
    types.push_back(events[i]["type"]);
  }
  EXPECT_EQ(types, (std::vector<std::string>{"response.created", "response.in_progress", "response.output_item.added",
                                             "response.content_part.added", "response.output_text.delta",
                                             "response.output_text.done", "response.content_part.done",
                                             "response.output_item.done", "response.completed"}));
  EXPECT_EQ(events.back()["response"]["status"], "completed");
  EXPECT_EQ(post("/v1/responses", {{"input", "Hi"}, {"max_output_tokens", 0}})["incomplete_details"]["reason"],
            "max_output_tokens");
}

TEST_F(ServiceTest, ModelsTokensHealthMetricsAndPage) {
  start();
  EXPECT_EQ(get("/v1/models")["data"][0]["id"], "fake");
  EXPECT_EQ(get("/v1/models/fake")["session_bytes"], 1000);
  EXPECT_EQ(get("/v1/models/fake")["session_bytes_per_token"], 4);
  EXPECT_EQ(get("/v1/models/other", 404)["error"]["code"], "model_not_found");
  EXPECT_EQ(post("/v1/completions", {{"model", "other"}, {"prompt", "a"}}, 404)["error"]["param"], "model");
  EXPECT_EQ(post("/tokenize", {{"prompt", "ab"}})["tokens"], json({97, 98}));
  EXPECT_EQ(post("/tokenize", {{"prompt", "ab"}, {"add_special_tokens", true}})["tokens"], json({256, 97, 98}));
  const auto info = get("/tokenizer_info");
  EXPECT_EQ(post("/tokenize", {{"prompt", info["eos_token"]}})["tokens"], json({257}));
  EXPECT_EQ(post("/detokenize", {{"tokens", {97, 98, 257}}})["prompt"], "ab");
  const auto unknown = post("/detokenize", {{"tokens", {97, 999}}}, 400)["error"];
  EXPECT_EQ(unknown["param"], "tokens");
  EXPECT_EQ(unknown["message"], "tokens: got token 999, expected 0 to 257");
  EXPECT_EQ(get("/health")["status"], "ok");
  const auto metrics = body_of(ask("GET", "/metrics"));
  for (const char* line :
       {"efla:time_to_first_token_seconds_bucket{le=\"0.1\"} 2\n",
        "efla:time_to_first_token_seconds_bucket{le=\"+Inf\"} 4\n", "efla:time_to_first_token_seconds_sum 3.5\n",
        "efla:slots 8\n", "efla:kv_cache_usage_perc 0.25\n", "efla:prefix_cache_queries_total 90\n",
        "efla:prefix_cache_hits_total 64\n", "efla:spec_decode_num_draft_tokens_total 40\n",
        "efla:spec_decode_num_accepted_tokens_total 30\n", "efla:request_success_total{finished_reason=\"stop\"} 3\n",
        "efla:http_replies_total{status=\"404\"} 2\n"}) {
    EXPECT_NE(metrics.find(line), std::string::npos) << line << metrics;
  }
  EXPECT_EQ(body_of(ask("GET", "/")), "<!doctype html>");
}

TEST_F(ServiceTest, ErrorsHaveOpenAisShape) {
  start();
  const auto error = post("/v1/completions", {{"prompt", "a"}, {"tolls", json::array()}}, 400)["error"];
  EXPECT_EQ(error["type"], "invalid_request_error");
  EXPECT_EQ(error["param"], "tolls");
  EXPECT_EQ(error["code"], "unknown_field");
  EXPECT_EQ(get("/v1/nothing", 404)["error"]["message"], "there is no /v1/nothing");
  const auto refused = [&](const std::string& method, const std::string& path, const std::string& methods) {
    const auto reply = ask(method, path);
    EXPECT_EQ(status_of(reply), 405) << reply;
    EXPECT_NE(reply.find("\r\nAllow: " + methods + "\r\n"), std::string::npos) << reply;
    EXPECT_EQ(json::parse(body_of(reply))["error"]["message"],
              path + " has no method " + method + ", expected " + methods);
  };
  refused("GET", "/v1/completions", "POST");
  refused("PUT", "/v1/sessions", "GET, HEAD, POST");
  refused("POST", "/v1/sessions/book", "GET, HEAD, DELETE");
  refused("DELETE", "/v1/sessions/book/state", "GET, HEAD, PUT");
  EXPECT_EQ(status_of(ask("POST", "/v1/completions", "{}", "Content-Type: text/plain\r\n")), 415);
  EXPECT_EQ(post("/v1/completions", {{"prompt", ""}}, 400)["error"]["param"], "prompt");
  EXPECT_EQ(post("/v1/completions", {{"prompt", {300}}}, 400)["error"]["param"], "prompt");
  EXPECT_EQ(post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 5000}}, 400)["error"]["param"], "max_tokens");
}

TEST_F(ServiceTest, PathsArePercentEncoded) {
  options_.model = "org/my mod\u00e8l";
  start();
  EXPECT_EQ(get("/v1/models/org%2Fmy%20mod%c3%A8l")["id"], options_.model);
  EXPECT_EQ(get("/v1/%6dodels")["data"][0]["id"], options_.model);
  EXPECT_EQ(status_of(ask("GET", "/v1/models/org/my%20mod%C3%A8l")), 404);
  EXPECT_EQ(status_of(ask("GET", "/v1%2Fmodels")), 404);
  post("/v1/sessions", {{"name", "a.b"}, {"prompt", "x"}}, 201);
  EXPECT_EQ(get("/v1/sessions/%61%2Eb")["name"], "a.b");
  // A decoded name keeps the rules for names.
  for (const char* name : {"a%2Fb", "..%2Fa", "%2E%2E", "a%00", "a%20b", "%C3%A8", "%5Fa"}) {
    const auto error = get(std::string("/v1/sessions/") + name, 400)["error"];
    EXPECT_EQ(error["param"], "name") << name;
    EXPECT_EQ(status_of(ask("PUT", std::string("/v1/sessions/") + name + "/state", "state:A")), 400) << name;
  }
  for (const char* path : {"/v1/models/%", "/v1/models/a%2", "/v1/models/%zz", "/v1/models/%+1", "/v1/models/%ff",
                           "/v1/sessions/%ff", "/v1/sessions/\xff"}) {
    const auto error = get(path, 400)["error"];
    EXPECT_NE(error["message"].get<std::string>().find("percent-encoded UTF-8"), std::string::npos) << error;
  }
}

TEST_F(ServiceTest, TargetsMayBeAbsoluteAndHaveMoreSlashes) {
  start();
  for (const char* target : {"http://host:1/v1/models", "HTTPS://host/v1/models?a=b", "/v1//models", "//v1/models",
                             "/v1/models/", "http://host//v1/models//"}) {
    EXPECT_EQ(get(target)["object"], "list") << target;
  }
  EXPECT_EQ(get("/v1/models/fake/")["id"], "fake");
  for (const char* target : {"http://host", "http://host/", "http://host?a=b", "//"}) {
    EXPECT_EQ(body_of(ask("GET", target)), "<!doctype html>") << target;
  }
  EXPECT_EQ(get("ftp://host/v1/models", 404)["error"]["message"], "there is no ftp://host/v1/models");
}

TEST_F(ServiceTest, CompressedBodiesAreRefused) {
  start();
  const auto as = [&](const std::string& encoding) {
    return ask("POST", "/tokenize", R"({"prompt": "a"})",
               "Content-Type: application/json\r\nContent-Encoding: " + encoding + "\r\n");
  };
  EXPECT_EQ(status_of(as("identity")), 200);
  const auto reply = as("gzip");
  EXPECT_EQ(status_of(reply), 415);
  EXPECT_NE(reply.find(R"(Content-Encoding: got \"gzip\", expected none)"), std::string::npos) << reply;
}

TEST_F(ServiceTest, MediaTypesAreComparedWholeAndWithoutCase) {
  start();
  const auto status = [&](const std::string& type) {
    return status_of(ask("POST", "/tokenize", R"({"prompt": "a"})", "Content-Type: " + type + "\r\n"));
  };
  for (const char* type :
       {"application/json", "Application/JSON", "application/json; charset=utf-8", "application/json ;charset=utf-8"}) {
    EXPECT_EQ(status(type), 200) << type;
  }
  for (const char* type : {"application/jsonfoo", "application/json-seq", "text/plain; application/json", ""}) {
    EXPECT_EQ(status(type), 415) << type;
  }
}

TEST_F(ServiceTest, LimitsOfPromptsQueueAndKeys) {
  options_.max_prompt_tokens = 10;
  options_.max_requests_per_key = 2;
  start();
  EXPECT_EQ(post("/v1/completions", {{"prompt", "12345678901"}}, 400)["error"]["code"], "context_length_exceeded");
  // What a state has still to read counts. A request gives its key's place back only after its reply.
  const auto becomes = [&](const std::string& path, const json& body, int status) {
    return soon([&] { return status_of(ask("POST", path, body.dump())) == status; });
  };
  const auto longest = std::string(10, 'x');
  post("/v1/sessions", {{"name", "s"}, {"prompt", "a"}}, 201);
  EXPECT_TRUE(becomes("/v1/completions", {{"prompt", longest}, {"session", "s"}}, 200));
  engine_->pending = 2;
  EXPECT_TRUE(becomes("/v1/completions", {{"prompt", longest}, {"session", "s"}}, 400));
  EXPECT_TRUE(becomes("/v1/completions", {{"prompt", longest}, {"state", to_base64("state:A")}}, 400));
  EXPECT_TRUE(becomes("/v1/sessions", {{"name", "t"}, {"parent", "s"}, {"prompt", longest}}, 400));
  engine_->step = 2ms;
  HttpClient one(port_), two(port_);
  const std::string endless = R"({"prompt": "a", "max_tokens": 4000, "stream": true})";
  for (auto* client : {&one, &two}) {
    client->send("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: " +
                 std::to_string(endless.size()) + "\r\n\r\n" + endless);
    client->read_until("data: ");
  }
  const auto third = ask("POST", "/v1/completions", R"({"prompt": "a"})");
  EXPECT_EQ(status_of(third), 429);
  EXPECT_NE(third.find("Retry-After: 1"), std::string::npos);
  one.close();
  two.close();
  EXPECT_TRUE(soon([&] { return status_of(ask("POST", "/v1/completions", R"({"prompt": "a"})")) == 200; }));
  engine_->max_queue = 0;
  for (const char* body : {R"({"prompt": "a"})", R"({"prompt": "a", "stream": true})"}) {
    std::string full;  // until the requests before have given their key's places back
    EXPECT_TRUE(soon([&] {
      full = ask("POST", "/v1/completions", body);
      return full.find("queue_full") != std::string::npos;
    })) << full;
    EXPECT_EQ(status_of(full), 429);
  }
}

TEST_F(ServiceTest, SaysHowToMakeRoomForStates) {
  start();
  engine_->submitting = [] { throw engine::NoRoom("engine", "session_memory", "9 bytes", "at most 8"); };
  const auto error = post("/v1/completions", {{"prompt", "a"}, {"n", 2}}, 503)["error"];
  EXPECT_EQ(error["code"], "no_room");
  EXPECT_EQ(
      error["message"],
      "no room for one more state: session_memory: got 9 bytes, expected at most 8; whoever runs the server sets a "
      "larger --session-memory, or a folder with --swap");
  engine_->submitting = {};
}

TEST_F(ServiceTest, KeysSeparateClients) {
  keys_ = Keys({"alpha", "beta"});
  start();
  const auto as = [&](const std::string& key, const std::string& method, const std::string& path,
                      const std::string& body) {
    return ask(method, path, body, "Content-Type: application/json\r\nAuthorization: Bearer " + key + "\r\n");
  };
  EXPECT_EQ(status_of(as("gamma", "GET", "/v1/models", "")), 401);
  EXPECT_EQ(status_of(ask("GET", "/v1/models", "", "Authorization: bearer alpha\r\n")), 200);
  EXPECT_EQ(status_of(ask("GET", "/v1/models", "", "Authorization: Bearer   alpha\r\n")), 200);
  EXPECT_EQ(status_of(ask("GET", "/v1/models", "", "Authorization: Bearer Alpha\r\n")), 401);
  EXPECT_EQ(status_of(ask("GET", "/v1/models", "", "Authorization: Beareralpha\r\n")), 401);
  EXPECT_EQ(status_of(ask("POST", "/v1/completions", R"({"prompt": "a"})")), 401);
  EXPECT_EQ(status_of(ask("GET", "/health")), 200);
  EXPECT_EQ(status_of(as("alpha", "POST", "/v1/sessions", R"({"name": "book", "prompt": "a"})")), 201);
  EXPECT_EQ(status_of(as("alpha", "GET", "/v1/sessions/book", "")), 200);
  const auto missing = as("beta", "GET", "/v1/sessions/book", "");
  EXPECT_EQ(status_of(missing), 404);
  EXPECT_NE(missing.find("got 'book'"), std::string::npos) << missing;  // not as the engine names it
  EXPECT_EQ(json::parse(body_of(as("alpha", "GET", "/v1/sessions", "")))["data"][0]["name"], "book");
  EXPECT_EQ(json::parse(body_of(as("beta", "GET", "/v1/sessions", "")))["data"].size(), 0U);
}

TEST_F(ServiceTest, ClientsThatLeaveAreCancelledWithinAStep) {
  start();
  for (const bool prefilling : {false, true}) {
    engine_->cancelled = 0;
    engine_->step = 20ms;
    engine_->prefill = prefilling ? 60'000ms : 0ms;
    HttpClient client(port_);
    const std::string body = R"({"prompt": "a", "max_tokens": 4000, "stream": true})";
    client.send("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n\r\n" + body);
    client.read_until("\r\n\r\n");
    const auto before = engine_->steps.load();
    client.close();
    EXPECT_TRUE(soon([&] { return engine_->cancelled == 1; }));
    EXPECT_LE(engine_->steps - before, 2U);
    engine_->prefill = 0ms;
  }
}

TEST_F(ServiceTest, ASubmissionThatTakesLongStopsNoStream) {
  start();
  engine_->step = 1ms;
  bool first = true;
  engine_->submitting = [&] {
    if (std::exchange(first, false)) return;
    const auto steps = engine_->steps.load();  // of the first reply, which streams
    EXPECT_TRUE(soon([&] { return engine_->steps > steps + 5 || engine_->statistics().running == 0; }));
  };
  const auto events = stream("/v1/completions", {{"prompt", {"a", "b"}}, {"max_tokens", 20}, {"stream", true}});
  EXPECT_EQ(events.size(), 42U);
}

TEST_F(ServiceTest, DeadlinesEndReplies) {
  options_.deadline = 50ms;
  start();
  engine_->step = 5ms;
  const auto reply = post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 4000}});
  EXPECT_EQ(reply["choices"][0]["finish_reason"], "deadline");
}

TEST_F(ServiceTest, SigtermFinishesAHundredStreamsAndSaysSo) {
  start();
  engine_->step = 10ms;
  std::vector<std::unique_ptr<HttpClient>> clients;
  const std::string body = R"({"prompt": "a", "max_tokens": 100, "seed": 0, "stream": true})";
  for (int i = 0; i < 100; ++i) {
    clients.push_back(std::make_unique<HttpClient>(port_));
    clients.back()->send_post("/v1/completions", body);
  }
  for (const auto& client : clients) client->read_until("data: ");
  kill(getpid(), SIGTERM);
  EXPECT_TRUE(soon([&] { return status_of(HttpClient(port_).get("/health")) == 503; }));
  EXPECT_EQ(status_of(HttpClient(port_).post("/v1/completions", R"({"prompt": "a"})")), 503);
  for (const auto& client : clients) EXPECT_NE(client->read_all().find("[DONE]"), std::string::npos);
  thread_.join();
  EXPECT_EQ(engine_->cancelled, 0);
}

TEST_F(ServiceTest, StoppingAnswersWhatItCancelsAfterTheGrace) {
  start();
  engine_->step = 5ms;
  const std::string fields = R"({"max_tokens": 4000, )";
  HttpClient whole(port_), events(port_), response(port_), session(port_);
  engine_->prefill = 60s;
  session.send_post("/v1/sessions", R"({"name": "book", "prompt": "a"})");
  EXPECT_TRUE(soon([&] { return engine_->statistics().running == 1; }));
  engine_->prefill = 0ms;
  whole.send_post("/v1/completions", fields + R"("prompt": "a"})");
  events.send_post("/v1/completions", fields + R"("prompt": "a", "stream": true})");
  response.send_post("/v1/responses", R"({"input": "a", "stream": true})");
  EXPECT_TRUE(soon([&] { return engine_->statistics().running == 4; }));
  events.read_until("data: ");
  response.read_until("data: ");
  stop(100ms);
  EXPECT_EQ(engine_->cancelled, 4);
  for (auto* client : {&whole, &session}) EXPECT_EQ(status_of(client->read_reply()), 503);
  for (auto* client : {&events, &response}) {
    const auto end = client->read_all();
    EXPECT_NE(end.find("the server is stopping"), std::string::npos) << end;
    EXPECT_TRUE(end.ends_with("\r\n0\r\n\r\n")) << end;
  }
}

}  // namespace
}  // namespace efla::serve
