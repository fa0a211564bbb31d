// A server of the API over real sockets, with an engine that follows a script.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "efla/serve/api/service.h"
#include "tests/serve/fake_engine.h"
#include "tests/support/http_client.h"

namespace efla::serve {

using namespace std::chrono_literals;
using nlohmann::json;
using test::body_of;
using test::HttpClient;
using test::status_of;

class ServiceTest : public testing::Test {
 protected:
  ServiceTest() {
    options_.model = "fake";
    options_.chat = load_chat_template("plain");
    options_.page = "<!doctype html>";
    http_.port = 0;
  }
  ~ServiceTest() override { stop(0ms); }

  void start(const std::string& script = "abcdefghij") {
    engine_ = std::make_unique<FakeEngine>(script, std::move(tokenizer_));
    service_ = std::make_unique<Service>(*engine_, options_, keys_, http_);
    const auto address = service_->address();
    port_ = std::stoi(address.substr(address.rfind(':') + 1));
    thread_ = std::thread([this] { ended_ = service_->run(60s, /*signals=*/true); });
  }
  void stop(std::chrono::milliseconds grace) {
    if (!thread_.joinable()) return;
    service_->stop(grace);
    thread_.join();
  }

  std::string ask(const std::string& method, const std::string& path, const std::string& body = "",
                  const std::string& fields = "Content-Type: application/json\r\n") const {
    HttpClient client(port_);
    return client.ask(method + " " + path + " HTTP/1.1\r\nHost: t\r\n" + fields +
                      "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
  }
  json post(const std::string& path, const json& body, int status = 200) const {
    const auto reply = ask("POST", path, body.dump());
    EXPECT_EQ(status_of(reply), status) << reply;
    return json::parse(body_of(reply));
  }
  json get(const std::string& path, int status = 200) const {
    const auto reply = ask("GET", path);
    EXPECT_EQ(status_of(reply), status) << reply;
    return json::parse(body_of(reply));
  }
  // The JSON of the events of a stream, without [DONE].
  std::vector<json> stream(const std::string& path, const json& body, bool done = true) const {
    const auto text = body_of(ask("POST", path, body.dump()));
    EXPECT_EQ(text.ends_with("data: [DONE]\n\n"), done) << text;
    std::vector<json> events;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
      if (line.starts_with("data: {")) events.push_back(json::parse(line.substr(6)));
    }
    return events;
  }
  // Returns the texts and logprobs of a completion's stream, joined per choice.
  std::vector<json> joined_stream(json body, std::size_t choices) const {
    body["stream"] = true;
    std::vector<json> joined(choices, {{"text", ""}, {"logprobs", json::object()}});
    for (const auto& event : stream("/v1/completions", body)) {
      const auto& choice = event["choices"][0];
      auto& into = joined.at(choice["index"]);
      into["text"] = into["text"].get<std::string>() + choice["text"].get<std::string>();
      if (choice["logprobs"].is_null()) continue;
      for (const auto& [name, values] : choice["logprobs"].items()) {
        for (const auto& value : values) into["logprobs"][name].push_back(value);
      }
    }
    return joined;
  }
  template <class Condition>
  static bool soon(const Condition& condition) {
    for (int i = 0; i < 1000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(5ms);
    }
    return false;
  }

  std::unique_ptr<data::Tokenizer> tokenizer_ = data::load_tokenizer("bytes");  // of the engine that starts
  ApiOptions options_;
  HttpOptions http_;
  Keys keys_;
  std::unique_ptr<FakeEngine> engine_;
  std::unique_ptr<Service> service_;
  std::thread thread_;
  bool ended_ = false;  // what run() has returned
  int port_ = 0;
};

}  // namespace efla::serve
