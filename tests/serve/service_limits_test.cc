// What no request may do: take more memory than the server has for requests, keep others waiting, or keep the server.
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "tests/serve/service_fixture.h"

namespace efla::serve {
namespace {

class ServiceLimits : public ServiceTest {
 protected:
  // Lets the submission of each request wait until release().
  void block_submissions() {
    engine_->submitting = [this] {
      ++submissions_;
      future_.wait();
    };
  }
  void release() { released_.set_value(); }

  static std::string completion(std::size_t bytes) { return R"({"prompt": ")" + std::string(bytes, 'x') + "\"}"; }
  static std::string list_of(const std::string& value, std::size_t count) {
    std::string text = R"({"x": [)" + value;
    for (std::size_t i = 1; i < count; ++i) text += "," + value;
    return text + "]}";
  }

  std::atomic<int> submissions_ = 0;
  std::promise<void> released_;
  const std::shared_future<void> future_ = released_.get_future().share();
};

TEST_F(ServiceLimits, WhatBodiesBecomeCountsAsMemoryOfRequests) {
  http_.max_body_bytes = 1 << 20;
  http_.request_memory = 4 << 20;
  start();
  // Sends a request when the one before has given its memory back, which may be after its reply.
  const auto ask_alone = [&](const std::string& path, const std::string& body) {
    EXPECT_TRUE(soon([&] { return ask("GET", "/metrics").find("efla:http_request_bytes 0\n") != std::string::npos; }));
    return ask("POST", path, body);
  };
  for (const std::string value : {"[]", "{}", "1", "\"\"", R"({"a":1})"}) {
    const auto reply = ask_alone("/v1/completions", list_of(value, 300'000 / value.size()));
    EXPECT_EQ(status_of(reply), 413) << value << reply;
    EXPECT_NE(reply.find("no_memory"), std::string::npos) << reply;
    EXPECT_NE(reply.find("expected at most 4194304 (--request-memory)"), std::string::npos) << reply;
  }
  EXPECT_EQ(status_of(ask_alone("/v1/completions", list_of("[]", 1'000))), 400);  // for the unknown field
  EXPECT_EQ(status_of(ask_alone("/v1/completions", completion(400'000))), 200);
  EXPECT_EQ(status_of(ask_alone("/v1/completions", completion(900'000))), 413);  // its ids take more
  EXPECT_EQ(status_of(ask_alone("/tokenize", completion(400'000))), 200);
  const auto stopping = R"({"prompt": "a", "n": 8, "stop": ")" + std::string(100'000, 'x') + "\"}";
  EXPECT_EQ(status_of(ask_alone("/v1/completions", stopping)), 413);  // each reply searches for it
  EXPECT_EQ(status_of(ask_alone("/v1/completions", R"({"prompt": "a", "n": 8, "stop": "x"})")), 200);
  EXPECT_TRUE(soon([&] { return ask("GET", "/metrics").find("efla:http_request_bytes 0\n") != std::string::npos; }));
}

TEST_F(ServiceLimits, ALongRequestKeepsNoShortOneWaiting) {
  start();
  block_submissions();
  HttpClient slow(port_);
  slow.send_post("/v1/completions", completion(100'000));
  EXPECT_TRUE(soon([&] { return submissions_ == 1; }));
  EXPECT_EQ(post("/tokenize", {{"prompt", "ab"}})["count"], 2);
  release();
  EXPECT_EQ(status_of(slow.read_reply()), 200);
}

TEST_F(ServiceLimits, ARequestWhoseClientHasLeftIsNotBegun) {
  start();
  block_submissions();
  HttpClient first(port_), last(port_);
  first.send_post("/v1/completions", completion(100'000));
  EXPECT_TRUE(soon([&] { return submissions_ == 1; }));
  {
    HttpClient gone(port_);
    gone.send_post("/v1/completions", completion(100'001));
    last.send_post("/v1/completions", completion(100'002));
    EXPECT_TRUE(soon([&] { return ask("GET", "/metrics").find("efla:http_connections 4\n") != std::string::npos; }));
  }
  EXPECT_TRUE(soon([&] { return ask("GET", "/metrics").find("efla:http_connections 3\n") != std::string::npos; }));
  release();
  for (auto* client : {&first, &last}) EXPECT_EQ(status_of(client->read_reply()), 200);
  EXPECT_EQ(engine_->submitted(), 2);
}

TEST_F(ServiceLimits, TheServerEndsAlthoughARequestDoesNot) {
  start();
  block_submissions();
  HttpClient client(port_);
  client.send_post("/v1/completions", completion(10));
  EXPECT_TRUE(soon([&] { return submissions_ == 1; }));
  const auto start = engine::Clock::now();
  stop(100ms);
  EXPECT_LT(engine::Clock::now() - start, 100ms + 5s);
  EXPECT_FALSE(ended_);
  EXPECT_EQ(status_of(client.read_reply()), 0);
  release();  // the destructor of the service waits for it
  EXPECT_TRUE(soon([&] { return engine_->submitted() == 1 && engine_->statistics().running == 0; }));
}

TEST_F(ServiceLimits, ARequestThatIsCancelledEndsBetweenTwoPiecesOfItsText) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer multiplies the time";
#endif
  http_.request_memory = std::size_t{1} << 32;
  http_.max_body_bytes = std::size_t{1} << 28;
  start();
  HttpClient client(port_);
  client.send_post("/tokenize", R"({"prompt": ")" + std::string(100 << 20, 'x') + "\"}");
  const auto bytes = [&] {
    const auto text = ask("GET", "/metrics");
    return std::stod(text.substr(text.find("\nefla:http_request_bytes ") + 25));
  };
  EXPECT_TRUE(soon([&] { return bytes() > 110e6; }));
  client.close();
  double most = 0;
  EXPECT_TRUE(soon([&] {
    const auto now = bytes();
    most = std::max(most, now);
    return now == 0;
  }));
  EXPECT_LT(most, 400e6);  // with all ids it would be 500e6
}

}  // namespace
}  // namespace efla::serve
