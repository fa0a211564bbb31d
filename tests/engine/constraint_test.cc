// Replies with a constraint: one at a time, several, and with drafts.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/engine/recorder.h"

namespace efla::engine {
namespace {

// Repeats a word, apart from its last letter, which the model chooses from two.
class Words final : public Constraint {
 public:
  std::unique_ptr<Constraint> clone() const override { return std::make_unique<Words>(*this); }
  void exclude(std::span<float> logits) override {
    for (std::size_t id = 0; id < logits.size(); ++id) {
      const char expected = kWord[place_];
      const auto byte = static_cast<char>(id);
      const bool allowed = id < 128 && (expected == '?' ? byte == 'x' || byte == 'y' : byte == expected);
      if (!allowed) logits[id] = -INFINITY;
    }
  }
  void take(std::int32_t id) override {
    if (id == '!') throw std::runtime_error("got a wrong token");
    place_ = (place_ + 1) % kWord.size();
  }

 private:
  static constexpr std::string_view kWord = "abc?";
  std::size_t place_ = 0;
};

Request words(std::int64_t tokens) {
  auto request = request_of("abc", tokens);
  request.sampling = {};
  request.constraint = std::make_shared<const Words>();
  return request;
}

TEST(Constraint, LimitsTheTokensOfAReply) {
  const auto engine = tiny_engine();
  for (const std::int64_t logprobs : {-1, 3}) {
    auto request = words(40);
    request.logprobs = logprobs;
    const auto record = reply(*engine, request);
    ASSERT_EQ(record.text.size(), 40U) << record.error;
    for (std::size_t i = 0; i < 40; i += 4) {
      EXPECT_EQ(record.text.substr(i, 3), "abc");
      EXPECT_TRUE(record.text[i + 3] == 'x' || record.text[i + 3] == 'y') << record.text;
    }
  }
}

TEST(Constraint, EachReplyToAPromptHasItsOwn) {
  const auto engine = tiny_engine();
  std::vector<std::shared_ptr<Recorder>> recorders;
  std::vector<std::shared_ptr<Listener>> listeners;
  for (int i = 0; i < 5; ++i) listeners.push_back(recorders.emplace_back(std::make_shared<Recorder>()));
  auto request = words(20);
  request.sampling.seed = 3;
  engine->submit(request, listeners);
  for (std::uint64_t i = 0; i < 5; ++i) {
    auto alone = words(20);
    alone.sampling.seed = 3 + i;
    EXPECT_EQ(recorders[i]->record().text, reply(*engine, alone).text);
  }
}

TEST(Constraint, DraftsChangeNothing) {
  const auto drafting = tiny_engine(), single = tiny_engine({.draft_tokens = 0});
  EXPECT_EQ(reply(*drafting, words(200)), reply(*single, words(200)));
  EXPECT_GT(drafting->statistics().accepted_tokens, 20U);
}

TEST(Constraint, AnExceptionEndsTheReplyAlone) {
  struct Broken final : Constraint {
    std::unique_ptr<Constraint> clone() const override { return std::make_unique<Broken>(); }
    void exclude(std::span<float> logits) override {
      if (tokens_ == 3) throw std::runtime_error("the mask is broken");
      logits.front() = -INFINITY;
    }
    void take(std::int32_t) override { ++tokens_; }

    int tokens_ = 0;
  };
  const auto engine = tiny_engine();
  auto request = words(20);
  request.constraint = std::make_shared<const Broken>();
  const auto record = reply(*engine, request);
  EXPECT_EQ(record.reason, FinishReason::error);
  EXPECT_EQ(record.error, "the mask is broken");
  EXPECT_EQ(reply(*engine, words(20)).reason, FinishReason::length);
}

}  // namespace
}  // namespace efla::engine
