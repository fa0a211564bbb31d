// The schedule's decisions, without a model.
#include "efla/engine/schedule.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace efla::engine {
namespace {

using std::chrono::duration;

const std::string kAnna = "anna", kBert = "bert";

Schedule::Prompt prompt_of(const std::string& client, std::uint64_t id, std::int64_t left, std::int64_t position = 0) {
  return {&client, id, 0, position, left, {}};
}

std::vector<std::int64_t> tokens_of(Schedule& schedule, std::vector<Schedule::Prompt> prompts) {
  schedule.distribute(prompts);
  std::vector<std::int64_t> tokens;
  for (const auto& prompt : prompts) tokens.push_back(prompt.tokens);
  return tokens;
}

// A schedule that knows that a token takes a millisecond.
Schedule timed(Schedule::Limits limits) {
  Schedule schedule(limits);
  schedule.learn(1000, duration<double>(1.0));
  return schedule;
}

using Tokens = std::vector<std::int64_t>;

TEST(ScheduleDecisions, TheClientWithTheFewestRunningRequestsBeginsNext) {
  Schedule schedule({});
  const std::vector<Schedule::Waiting> waiting{{&kAnna, 1}, {&kAnna, 2}, {&kBert, 3}};
  EXPECT_EQ(schedule.next(waiting, {}), 0U);
  EXPECT_EQ(schedule.next(waiting, {{kAnna, 1}}), 2U);
  EXPECT_EQ(schedule.next(waiting, {{kAnna, 1}, {kBert, 1}}), 0U);
  tokens_of(schedule, {prompt_of(kAnna, 1, 10)});  // now anna was served last
  EXPECT_EQ(schedule.next(waiting, {{kAnna, 1}, {kBert, 1}}), 2U);
}

TEST(ScheduleDecisions, PiecesEndWhereAPromptMayBeCut) {
  auto schedule = timed({.step_tokens = 128, .step_time = duration<double>(1.0)});
  EXPECT_EQ(tokens_of(schedule, {prompt_of(kAnna, 1, 1000)}), (Tokens{128}));
  EXPECT_EQ(tokens_of(schedule, {prompt_of(kAnna, 1, 1000, 70)}), (Tokens{122}));  // to 192, and not beyond 198
  EXPECT_EQ(tokens_of(schedule, {prompt_of(kAnna, 1, 100)}), (Tokens{100}));
  auto long_pieces = timed({.step_tokens = 512, .step_time = duration<double>(1.0), .cut_tokens = 2048});
  EXPECT_EQ(tokens_of(long_pieces, {prompt_of(kAnna, 1, 5000)}), (Tokens{2048}));  // a step takes one piece at least
}

TEST(ScheduleDecisions, ClientsAndTheirRequestsTakeTurns) {
  auto schedule = timed({.step_tokens = 256, .step_time = duration<double>(1.0)});
  EXPECT_EQ(tokens_of(schedule, {prompt_of(kAnna, 1, 1000), prompt_of(kAnna, 2, 1000), prompt_of(kBert, 3, 1000)}),
            (Tokens{64, 64, 128}));
}

TEST(ScheduleDecisions, ALongPromptDoesNotDelayAShortOne) {
  auto schedule = timed({.step_tokens = 128, .step_time = duration<double>(1.0)});
  EXPECT_EQ(tokens_of(schedule, {prompt_of(kAnna, 1, 100'000), prompt_of(kBert, 2, 10)}), (Tokens{64, 10}));
}

TEST(ScheduleDecisions, APromptPausesWhereItsStateIsWanted) {
  auto schedule = timed({.step_tokens = 512, .step_time = duration<double>(1.0)});
  auto wanted = prompt_of(kAnna, 1, 1000);
  wanted.pauses = {192};
  EXPECT_EQ(tokens_of(schedule, {wanted}), (Tokens{192}));
}

TEST(ScheduleDecisions, AStepTakesAsManyTokensAsFitItsTime) {
  const Schedule::Limits limits{.step_tokens = 512, .step_time = duration<double>(0.2)};
  Schedule unknown(limits);
  EXPECT_EQ(tokens_of(unknown, {prompt_of(kAnna, 1, 1000)}), (Tokens{64}));
  auto known = timed(limits);  // 200 tokens in 0.2 s
  EXPECT_EQ(tokens_of(known, {prompt_of(kAnna, 1, 1000)}), (Tokens{192}));
  known.learn(10, duration<double>(0.1));  // of few tokens: an upper bound, and no lower one
  EXPECT_EQ(tokens_of(known, {prompt_of(kAnna, 1, 1000)}), (Tokens{192}));
  for (int i = 0; i < 50; ++i) known.learn(192, duration<double>(0.192 * 3));
  EXPECT_EQ(tokens_of(known, {prompt_of(kAnna, 1, 1000)}), (Tokens{64}));
}

TEST(ScheduleDecisions, ASlowStepIsForgottenAtAFastOne) {
  Schedule schedule({.step_tokens = 8192, .step_time = duration<double>(0.05)});
  const auto read = [&] { return tokens_of(schedule, {prompt_of(kAnna, 1, 100000)}); };
  schedule.learn(64, duration<double>(1.0));
  EXPECT_EQ(read(), (Tokens{64}));
  schedule.learn(64, duration<double>(0.0064));  // 500 tokens in 0.05 s
  EXPECT_EQ(read(), (Tokens{448}));
  schedule.learn(448, duration<double>(0.002));
  EXPECT_EQ(read(), (Tokens{8192}));
}

TEST(ScheduleDecisions, AShortPromptDoesNotShortenTheNextSteps) {
  Schedule schedule({.step_tokens = 8192, .step_time = duration<double>(0.05)});
  const auto read = [&] { return tokens_of(schedule, {prompt_of(kAnna, 1, 100000)}); };
  schedule.learn(8192, duration<double>(0.04));
  for (int i = 0; i < 20; ++i) schedule.learn(512, duration<double>(0.02));  // each takes what a GPU needs for any step
  EXPECT_EQ(read(), (Tokens{8192}));
  for (int i = 0; i < 20; ++i) schedule.learn(8192, duration<double>(0.1));
  EXPECT_LT(read().front(), 8192);
}

TEST(ScheduleDecisions, AStepTakesTheLeastTokensWhateverTheirTime) {
  Schedule schedule({.step_tokens = 8192, .least_tokens = 512});
  const auto read = [&] { return tokens_of(schedule, {prompt_of(kAnna, 1, 100000)}); };
  EXPECT_EQ(read(), (Tokens{512}));
  schedule.learn(512, duration<double>(10.0));
  EXPECT_EQ(read(), (Tokens{512}));
}

TEST(ScheduleDecisions, OnlyStepsOfFewTextsHaveDrafts) {
  const Schedule schedule({.draft_tokens = 5, .most_drafting = 3, .most_decoded = 8});
  EXPECT_EQ(schedule.most_drafted(1), 5);
  EXPECT_EQ(schedule.most_drafted(2), 3);
  EXPECT_EQ(schedule.most_drafted(3), 1);
  EXPECT_EQ(schedule.most_drafted(4), 0);
}

TEST(ScheduleDecisions, ForgetsClientsWithoutARequest) {
  auto schedule = timed({.step_tokens = 64, .step_time = duration<double>(1.0)});
  std::vector<std::string> clients;
  for (int i = 0; i < 1100; ++i) clients.push_back("client" + std::to_string(i));
  for (const auto& client : clients) tokens_of(schedule, {prompt_of(client, 1, 64)});
  schedule.forget_clients([&](const std::string& client) { return client == clients[7]; });
  EXPECT_EQ(schedule.served(clients[7]), 8U);
  EXPECT_EQ(schedule.served(clients[8]), 0U);
}

}  // namespace
}  // namespace efla::engine
