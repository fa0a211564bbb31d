// A server whose memory ends: one allocation fails, and its request alone ends.
#include <gtest/gtest.h>

#include "tests/serve/service_fixture.h"
#include "tests/support/no_memory.h"

namespace efla::serve {
namespace {

class NoMemory : public ServiceTest {
 protected:
  // Sends a request again and again while another allocation of at least `bytes` bytes fails each time, until none is
  // left. The request ends with its usual status, with status 503, or with its connection; the next one succeeds.
  void expect_survival(const std::string& request, int status, std::size_t bytes) {
    start();
    std::int64_t failures = 0;
    for (bool failed = true; failed; ++failures) {
      HttpClient client(port_);
      client.get("/health");  // the connection exists
      std::string reply;
      {
        const test::OneFailure one(failures, bytes);
        client.send(request);
        reply = client.read_reply();
        failed = test::OneFailure::happened();
      }
      EXPECT_TRUE(status_of(reply) == status || status_of(reply) == 503 || (reply.empty() && client.ended()))
          << failures << ": " << reply.substr(0, 1000);
      HttpClient next(port_);
      next.send(request);
      EXPECT_EQ(status_of(next.read_reply()), status) << failures;
    }
    EXPECT_GT(failures, 1);
    EXPECT_TRUE(soon([&] { return engine_->statistics().running == 0; }));
    EXPECT_EQ(engine_->stored(), 0U);
    EXPECT_TRUE(soon([&] { return engine_->held_texts() == 0; }));
  }
  static std::string post(const std::string& path, const std::string& body) {
    return "POST " + path +
           " HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
           "\r\n\r\n" + body;
  }
};

TEST_F(NoMemory, ForIds) { expect_survival(post("/tokenize", R"({"prompt": "some text"})"), 200, 0); }

TEST_F(NoMemory, ForALongText) {
  expect_survival(post("/tokenize", R"({"prompt": ")" + std::string(200'000, 'x') + "\"}"), 200, 0);
}

TEST_F(NoMemory, ForNestedLists) {
  std::string lists = "[[1]";
  for (int i = 0; i < 30; ++i) lists += R"(,[{"a": [2]}, "text"])";
  expect_survival(post("/tokenize", R"({"prompt": )" + lists + "]}"), 400, 0);
}

TEST_F(NoMemory, ForWhatIsNotFound) { expect_survival("GET /none HTTP/1.1\r\nHost: t\r\n\r\n", 404, 0); }

TEST_F(NoMemory, ForMetrics) { expect_survival("GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n", 200, 0); }

// The engine of tests does not outlive a small allocation that fails.
TEST_F(NoMemory, ForPrompts) {
  expect_survival(
      post("/v1/completions", R"({"n": 2, "max_tokens": 2, "prompt": ")" + std::string(200'000, 'x') + "\"}"), 200,
      64 << 10);
}

}  // namespace
}  // namespace efla::serve
