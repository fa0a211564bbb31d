// The engine: replies, ends, limits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/engine/recorder.h"
#include "tests/support/expect_error.h"
#include "tests/support/special_tokens.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {
namespace {

TEST(Engine, EndsAtEachTokenThatEndsAText) {
  const auto whole = reply(*tiny_engine(), request_of("abc", 12));
  auto config = test::tiny_model().config();
  using Ids = std::vector<std::int32_t>;
  for (const bool several : {true, false}) {
    config.eos_token_id = {whole.ids[5]};
    if (several) config.eos_token_id.insert(config.eos_token_id.begin(), 3);
    LocalEngine engine(nn::LanguageModel(config, nn::Initialiser(1)), data::load_tokenizer("bytes"), {});
    EXPECT_EQ(engine.info().ends, several ? (Ids{257, 3, whole.ids[5]}) : (Ids{257, whole.ids[5]}));
    const auto record = reply(engine, request_of("abc", 12));
    EXPECT_EQ(record.reason, FinishReason::stop);
    EXPECT_EQ(std::ssize(record.ids), std::find(whole.ids.begin(), whole.ids.end(), whole.ids[5]) - whole.ids.begin());
  }
}

TEST(Engine, EndsAtStopStringsIdsAndTheLength) {
  const auto engine = tiny_engine();
  const auto whole = reply(*engine, request_of("abc", 12));
  EXPECT_EQ(whole.reason, FinishReason::length);
  EXPECT_EQ(whole.ids.size(), 12U);

  auto by_id = request_of("abc", 12);
  by_id.stop_token_ids = {whole.ids[5]};
  const auto first = std::find(whole.ids.begin(), whole.ids.end(), whole.ids[5]) - whole.ids.begin();
  const auto stopped = reply(*engine, by_id);
  EXPECT_EQ(stopped.reason, FinishReason::stop);
  EXPECT_EQ(static_cast<std::ptrdiff_t>(stopped.ids.size()), first);

  auto greedy = request_of("abc", 40);
  greedy.sampling.logit_bias.clear();
  for (std::int32_t id = 0; id < 258; ++id) {
    if (id < 'a' || id > 'z') greedy.sampling.logit_bias[id] = -100.0;
  }
  const auto letters = reply(*engine, greedy);
  ASSERT_EQ(letters.text.size(), 40U);
  greedy.stop = {"no such text", letters.text.substr(20, 5)};
  const auto cut = reply(*engine, greedy);
  EXPECT_EQ(cut.reason, FinishReason::stop);
  EXPECT_EQ(cut.stop, letters.text.substr(20, 5));
  EXPECT_EQ(cut.text, letters.text.substr(0, letters.text.find(cut.stop)));

  auto none = request_of("abc", 0);
  const auto recorder = std::make_shared<Recorder>();
  engine->submit(none, recorder);
  EXPECT_EQ(recorder->end().reason, FinishReason::length);
  EXPECT_EQ(recorder->end().usage.prompt_tokens, 3);
  EXPECT_EQ(recorder->end().usage.completion_tokens, 0);
}

TEST(Engine, EndsAtSpecialTokensOfStopStrings) {
  const auto engine_with = [](std::int64_t draft_tokens) {
    return std::make_unique<LocalEngine>(test::tiny_model(), std::make_unique<test::BytesWithSpecial>('d', "<|end|>"),
                                         EngineOptions{.draft_tokens = draft_tokens});
  };
  auto request = request_of("abcabcabc", 100);
  for (const char letter : std::string("abcd")) request.sampling.logit_bias[letter] = 100.0;
  for (const std::int64_t draft_tokens : {0, 7}) {
    const auto engine = engine_with(draft_tokens);
    const auto whole = reply(*engine, request).ids;
    ASSERT_EQ(whole.size(), 100U);
    auto by_id = request, by_text = request, longer = request, part = request;
    by_id.stop_token_ids = {'d'};
    by_text.stop = {"<|end|>"};
    const auto ended = reply(*engine, by_id);
    EXPECT_EQ(ended.reason, FinishReason::stop);
    EXPECT_LT(ended.ids.size(), 100U);
    EXPECT_EQ(reply(*engine, by_text), ended);
    part.stop = {"end", "<", "|>"};
    EXPECT_EQ(reply(*engine, part).reason, FinishReason::length);

    const std::vector<std::int32_t> stop{'b', 'd', 'c'};
    longer.stop = {"b<|end|>c"};
    longer.end_turn = "!";
    const auto begin = std::search(whole.begin(), whole.end(), stop.begin(), stop.end());
    ASSERT_NE(begin, whole.end());
    std::string text(whole.begin(), begin);
    std::erase(text, 'd');
    const auto got = reply(*engine, in_session(longer, "", "s"));
    EXPECT_EQ(got.reason, FinishReason::stop);
    EXPECT_EQ(got.stop, longer.stop[0]);
    EXPECT_EQ(got.text, text);
    EXPECT_EQ(engine->session("s").tokens, 9 + (begin - whole.begin()) + 1);  // prompt, reply, "!"
  }
}

TEST(Engine, ScoresPromptAndReplyByTheModelsOwnDistribution) {
  const auto engine = tiny_engine();
  auto request = request_of("The prompt", 5);
  request.logprobs = 2;
  request.echo = true;
  const auto record = reply(*engine, request);
  const auto model = test::tiny_model();
  std::vector<std::int64_t> ids;
  for (const char c : std::string("The prompt")) ids.push_back(static_cast<std::uint8_t>(c));
  const auto prompt = ids.size();
  ids.insert(ids.end(), record.ids.begin(), record.ids.end());
  const auto logits = model.logits(torch::tensor(ids, torch::kLong).unsqueeze(0)).squeeze(0);
  const auto expected = torch::log_softmax(logits, 1);
  const auto value = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
  ASSERT_EQ(record.echo.size(), 1 + 3 * (prompt - 1));
  EXPECT_TRUE(std::isnan(value(record.echo[0])));
  for (std::size_t i = 1; i < prompt; ++i) {
    const auto row = expected[static_cast<std::int64_t>(i) - 1];
    EXPECT_NEAR(value(record.echo[3 * i - 2]), row[ids[i]].item<float>(), 1e-3);
    EXPECT_NEAR(value(record.echo[3 * i - 1]), row.max().item<float>(), 1e-3);
  }
  ASSERT_EQ(record.scores.size(), 3 * record.ids.size());
  for (std::size_t i = 0; i < record.ids.size(); ++i) {
    const auto row = expected[static_cast<std::int64_t>(prompt + i) - 1];
    EXPECT_NEAR(value(record.scores[3 * i]), row[record.ids[i]].item<float>(), 1e-3);
    EXPECT_EQ(record.others[2 * i], row.argmax().item<std::int64_t>());
    EXPECT_GE(value(record.scores[3 * i + 1]), value(record.scores[3 * i + 2]));
  }
}

TEST(Engine, CancelsInTheQueueInThePromptAndInTheReply) {
  const auto slot = tiny_engine()->info().session_bytes;
  const auto engine = tiny_engine({.state_memory = slot, .step_tokens = 64});
  std::atomic<RequestId> running = 0;
  std::size_t last = 0;  // token at which it was cancelled
  const auto reply_of = std::make_shared<Recorder>([&](std::size_t tokens) {
    if (tokens < 3 || running == 0 || last != 0) return;
    last = tokens;
    engine->cancel(running);
  });
  auto endless = request_of("x", 1 << 20);
  endless.save_as = "unfinished";
  const auto waiting = std::make_shared<Recorder>(), prompt = std::make_shared<Recorder>();
  const auto in_reply = engine->submit(endless, reply_of);
  const auto in_queue = engine->submit(request_of("y", 4), waiting);
  engine->cancel(in_queue);
  running = in_reply;  // from now on the slot may become free
  EXPECT_EQ(waiting->record().reason, FinishReason::cancelled);
  EXPECT_EQ(reply_of->record().reason, FinishReason::cancelled);
  EXPECT_EQ(reply_of->record().ids.size(), last);
  const auto in_prompt = engine->submit(request_of(std::string(1 << 20, 'z'), 4), prompt);
  while (engine->statistics().running == 0) std::this_thread::yield();
  engine->cancel(in_prompt);
  EXPECT_EQ(prompt->record().reason, FinishReason::cancelled);
  EXPECT_TRUE(engine->sessions().empty());
  EXPECT_EQ(reply(*engine, request_of("y", 4)).ids.size(), 4U);  // the slot is free again

  auto late = request_of("x", 1 << 20);
  late.deadline = Clock::now() + std::chrono::milliseconds(20);
  EXPECT_EQ(reply(*engine, late).reason, FinishReason::deadline);
}

TEST(Engine, AShortPromptDoesNotWaitForALongOne) {
  const auto engine = tiny_engine({.step_tokens = 64});
  const auto large = std::make_shared<Recorder>();
  const auto id = engine->submit(request_of(std::string(1 << 20, 'z'), 4), large);
  for (int i = 0; i < 3; ++i) {  // of the same client
    EXPECT_EQ(reply(*engine, request_of("short", 4)).ids.size(), 4U);
    EXPECT_FALSE(large->ended());
  }
  engine->cancel(id);
}

TEST(Engine, CachesAStateWhereTheClientAsks) {
  const auto cached = [](std::vector<std::int64_t> cache_after) {
    const auto engine = tiny_engine();
    const std::string shared(300, 's');
    auto request = request_of(shared + std::string(100, 'a'), 1);
    request.cache_after = std::move(cache_after);
    reply(*engine, request);
    // Without it the second prompt finds nothing, and the third what the second left where it left the first.
    const auto recorder = std::make_shared<Recorder>();
    engine->submit(request_of(shared + std::string(100, 'b'), 1), recorder);
    return recorder->end().usage.cached_tokens;
  };
  EXPECT_EQ(cached({}), 0);
  EXPECT_EQ(cached({300}), 256);
  EXPECT_EQ(cached({64, 200}), 192);
  EXPECT_EQ(cached({-1, 0, 63, 100'000}), 0);
}

TEST(Engine, CountsTokensOfPromptsThatMayUseTheCache) {
  const auto engine = tiny_engine();
  reply(*engine, in_session(request_of(std::string(300, 's'), 1), "", "text"));
  reply(*engine, request_of(std::string(300, 's'), 1));
  reply(*engine, request_of("short", 1));
  EXPECT_EQ(engine->statistics().cache_queries, 605U);
  EXPECT_EQ(engine->statistics().cache_hits, 256U);
  auto echo = request_of(std::string(300, 's'), 1);
  echo.echo = true;
  reply(*engine, echo);
  reply(*engine, in_session(request_of("continued", 1), "text", ""));
  EXPECT_EQ(engine->statistics().cache_queries, 605U);
  const auto without = tiny_engine({.cache_memory = 0});
  reply(*without, request_of("short", 1));
  EXPECT_EQ(without->statistics().cache_queries, 0U);
}

TEST(Engine, ClientsShareNoStatesOfTheCache) {
  const auto engine = tiny_engine();
  const auto cached = [&](const std::string& client) {
    auto request = request_of(std::string(300, 's'), 1);
    request.client = client;
    const auto recorder = std::make_shared<Recorder>();
    engine->submit(request, recorder);
    return recorder->end().usage.cached_tokens;
  };
  EXPECT_EQ(cached("alpha"), 0);
  EXPECT_EQ(cached("beta"), 0);
  EXPECT_EQ(cached("alpha"), 256);
  EXPECT_EQ(cached("beta"), 256);
}

TEST(Engine, DraftsOfRepetitionsChangeNoBit) {
  std::vector<Request> requests;
  for (const double temperature : {0.0, 0.3}) {
    for (const bool stored : {false, true}) {
      Request request = request_of("abcabcabcabc", 60);
      request.sampling.temperature = temperature;
      request.logprobs = 1;
      // Of few letters, so that the text repeats.
      for (const char c : std::string("abcd")) request.sampling.logit_bias[c] = 100.0;
      if (stored) {
        request.save_as = "s";
        request.end_turn = "!";
        request.stop = {"aaaaaaaad", "bbbbbbbbd", "ccccccccd", "ddddddda"};
      }
      requests.push_back(request);
    }
  }
  for (const std::string weights : {"float32", "int8"}) {
    const auto drafting = tiny_engine({.weights = weights}),
               single = tiny_engine({.weights = weights, .draft_tokens = 0});
    for (const auto& request : requests) {
      EXPECT_EQ(reply(*drafting, request), reply(*single, request));
      if (request.save_as.empty()) continue;
      EXPECT_EQ(drafting->save("s"), single->save("s"));
    }
    const auto drafted = drafting->statistics();
    EXPECT_GT(drafted.accepted_tokens, 40U);
    EXPECT_GT(drafted.drafted_tokens, drafted.accepted_tokens);
    EXPECT_LT(drafted.steps, single->statistics().steps);
    EXPECT_EQ(single->statistics().drafted_tokens, 0U);
  }
}

TEST(Engine, AStepOfPromptsTakesNoLongerThanItsTime) {
  // A step with so little time takes 64 tokens, one with so much as many as it may.
  for (const auto& [time, steps] :
       {std::pair{std::chrono::milliseconds(0), 32}, {std::chrono::milliseconds(60'000), 5}}) {
    const auto engine = tiny_engine({.step_tokens = 512, .step_time = time});
    EXPECT_EQ(reply(*engine, request_of(std::string(2048, 'z'), 0)).reason, FinishReason::length);
    EXPECT_NEAR(static_cast<double>(engine->statistics().steps), steps, 1.0);
  }
}

TEST(Engine, ShortPromptsAreReadTogetherBeforeALongOneWasTimed) {
  const auto engine = tiny_engine({.step_tokens = 512, .step_time = std::chrono::milliseconds(60'000)});
  std::promise<void> queued;
  const auto first =
      std::make_shared<Recorder>([&, waits = queued.get_future().share()](std::size_t) { waits.wait(); });
  engine->submit(request_of("x", 1), first);
  std::vector<std::shared_ptr<Recorder>> prompts;
  for (int i = 0; i < 48; ++i) {
    prompts.push_back(std::make_shared<Recorder>());
    engine->submit(request_of(std::string(40, 'z'), 0), prompts.back());
  }
  queued.set_value();
  for (const auto& prompt : prompts) EXPECT_EQ(prompt->record().reason, FinishReason::length);
  EXPECT_LE(engine->statistics().steps, 8U);  // twelve prompts fit a step
}

TEST(Engine, TheStateBeforeAStopStringHasASlotOfItsOwn) {
  const auto slot = tiny_engine()->info().session_bytes;
  auto stored = in_session(request_of("x", 1 << 20), "", "a");
  stored.stop = {"no such text"};
  stored.end_turn = "!";
  const auto small = tiny_engine({.state_memory = slot});
  test::expect_error([&] { small->submit(stored, std::make_shared<Recorder>()); }, "state_memory", "two states");

  const auto engine = tiny_engine({.state_memory = 3 * slot});
  const auto soon = [&](auto holds) {
    for (int i = 0; i < 10'000 && !holds(engine->statistics()); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return holds(engine->statistics());
  };
  const auto listener = std::make_shared<Recorder>();
  const auto first = engine->submit(stored, listener);
  stored.save_as = "b";
  engine->submit(stored, std::make_shared<Recorder>());
  engine->submit(request_of("y", 1 << 20), std::make_shared<Recorder>());
  const auto steps = engine->statistics().steps;
  EXPECT_TRUE(soon([&](const Statistics& now) { return now.steps > steps + 5; }));
  EXPECT_EQ(engine->statistics().running, 1);
  EXPECT_EQ(engine->statistics().queued, 2);
  engine->cancel(first);
  EXPECT_TRUE(soon([](const Statistics& now) { return now.running == 2 && now.queued == 0; }));
}

TEST(Engine, AnEngineThatEndsCancels) {
  const auto recorder = std::make_shared<Recorder>();
  {
    const auto engine = tiny_engine();
    engine->submit(request_of("x", 1 << 20), recorder);
  }
  EXPECT_EQ(recorder->record().reason, FinishReason::cancelled);
}

TEST(Engine, WhatAListenerThrowsEndsItsRequest) {
  const auto engine = tiny_engine();
  const auto recorder = std::make_shared<Recorder>([](std::size_t) { throw std::runtime_error("gone"); });
  engine->submit(request_of("x", 100), recorder);
  EXPECT_EQ(recorder->record().reason, FinishReason::error);
  EXPECT_EQ(recorder->record().error, "gone");
}

TEST(Engine, TimesNoTokenThatCannotBeDrawn) {
  const auto engine = tiny_engine();
  auto request = request_of("x", 2);
  for (std::int32_t id = 0; id < 258; ++id) request.sampling.logit_bias[id] = -100.0;
  EXPECT_EQ(reply(*engine, request).reason, FinishReason::error);
  EXPECT_EQ(engine->statistics().first_token_seconds.total(), 0U);
  EXPECT_EQ(reply(*engine, request_of("x", 2)).reason, FinishReason::length);
  EXPECT_EQ(engine->statistics().first_token_seconds.total(), 1U);
  EXPECT_EQ(engine->statistics().between_tokens_seconds.total(), 1U);
}

TEST(Engine, RefusesWhatItCannotDo) {
  const auto slot = tiny_engine()->info().session_bytes;
  test::expect_error([&] { tiny_engine({.state_memory = slot - 1}); }, "state_memory", "bytes of one text's state");
  test::expect_error([&] { tiny_engine({.state_memory = std::size_t{1} << 60}); }, "state_memory",
                     "memory that this process may use");
  test::expect_error([&] { tiny_engine({.step_tokens = 100}); }, "step_tokens", "a multiple of 64");
  test::expect_error([&] { tiny_engine({.weights = "int3"}); }, "weights", "int8");
  test::expect_error([&] { tiny_engine({.draft_tokens = 8}); }, "draft_tokens", "0 to 7");
  test::expect_error([&] { tiny_engine({.draft_tokens = -1}); }, "draft_tokens", "0 to 7");
  test::expect_error([&] { tiny_engine({.step_time = std::chrono::milliseconds(-1)}); }, "step_time", "a time");
  const auto engine = tiny_engine({.state_memory = slot, .max_queue = 2});
  const auto refused = [&](auto change, const std::string& field, const std::string& says = "expected") {
    Request request = request_of("x", 1);
    change(request);
    test::expect_error([&] { engine->submit(request, std::make_shared<Recorder>()); }, field, says);
  };
  refused([](Request& r) { r.prompt.clear(); }, "prompt");
  refused([](Request& r) { r.prompt = {258}; }, "prompt");
  refused([](Request& r) { r.max_tokens = -1; }, "max_tokens");
  refused([](Request& r) { r.logprobs = 21; }, "logprobs");
  refused([](Request& r) { r.stop = {""}; }, "stop");
  for (const double top_p : {-0.1, 1.5}) {
    refused([&](Request& r) { r.sampling.top_p = top_p; }, "top_p", "expected 0 (the most probable token) to 1");
  }
  refused([](Request& r) { r.sampling.temperature = NAN; }, "temperature");
  refused([](Request& r) { r.sampling.logit_bias = {{300, 1.0}}; }, "logit_bias");
  refused([](Request& r) { r.save_as = "a b"; }, "session");
  refused([](Request& r) { r.places = 3; }, "places");
  const auto listener = std::make_shared<Recorder>();
  EXPECT_THROW(
      {
        for (int i = 0; i < 5; ++i) engine->submit(request_of("x", 1 << 20), listener);
      },
      QueueFull);
}

}  // namespace
}  // namespace efla::engine
