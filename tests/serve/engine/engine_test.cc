// The engine: replies, ends, sessions, limits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "efla/generate/generator.h"
#include "tests/serve/engine/recorder.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::serve {
namespace {

Request request_of(std::string_view prompt, std::int64_t max_tokens, std::uint64_t seed = 7) {
  Request request;
  request.prompt = ids_of(prompt);
  request.max_tokens = max_tokens;
  request.sampling.seed = seed;
  request.sampling.logit_bias = {{256, -100.0}, {257, -100.0}};  // no end of the text
  return request;
}

TEST(Engine, DrawsWhatTheGeneratorDraws) {
  const auto engine = tiny_engine();
  auto request = request_of("Once upon a time", 20);
  request.sampling.logit_bias.clear();
  request.sampling.temperature = 0.0;
  const auto record = reply(*engine, request);
  const auto model = test::tiny_model();
  const auto tokenizer = data::load_tokenizer("bytes");
  const generate::Generator generator(model, *tokenizer);
  generate::Session session(model, 0);
  const auto expected =
      generator.reply(session, generator.encode(session, "Once upon a time", false), {.max_tokens = 20});
  EXPECT_EQ(record.ids, std::vector<std::int32_t>(expected.ids.begin(),
                                                  expected.ids.end() - (record.reason == FinishReason::stop ? 1 : 0)));
  EXPECT_EQ(record.text, expected.text);
}

TEST(Engine, HasTheBitsOfTheGeneratorWithTheSameWeights) {
  const test::TempFolder folder;
  const auto model = test::tiny_model();
  const auto tokenizer = data::load_tokenizer("bytes");
  for (const std::string weights : {"bfloat16", "int8"}) {
    nn::InferenceModel inference(model, nn::parse_weight_type(weights));
    const generate::Generator generator(model, *tokenizer, &inference);
    const auto engine = tiny_engine({.weights = weights, .step_tokens = 64});
    generate::Session session(model, 5);
    for (const auto& prompt : std::vector<std::string>{std::string(150, 'q'), "x", ""}) {
      auto request = request_of(prompt, 20, 5);
      request.sampling.logit_bias.clear();
      request.session = session.empty() ? "" : "text";
      request.save_as = "text";
      reply(*engine, request);
      session.draws = 0;
      generator.reply(session, generator.encode(session, prompt, false),
                      {.sampling = {.temperature = 1.0}, .max_tokens = 20});
      generate::save_session(folder.file("text"), session, model);
      std::ifstream in(folder.file("text"), std::ios::binary);
      EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), engine->save("text")) << weights;
    }
  }
}

TEST(Engine, EndsAtStopStringsIdsAndTheLength) {
  const auto engine = tiny_engine();
  const auto whole = reply(*engine, request_of("abc", 12));
  EXPECT_EQ(whole.reason, FinishReason::length);
  EXPECT_EQ(whole.ids.size(), 12U);

  auto by_id = request_of("abc", 12);
  by_id.stop_ids = {whole.ids[5]};
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
  running = engine->submit(endless, reply_of);
  const auto in_queue = engine->submit(request_of("y", 4), waiting);
  engine->cancel(in_queue);
  EXPECT_EQ(waiting->record().reason, FinishReason::cancelled);
  EXPECT_EQ(reply_of->record().reason, FinishReason::cancelled);
  EXPECT_EQ(reply_of->record().ids.size(), last);
  const auto in_prompt = engine->submit(request_of(std::string(1 << 20, 'z'), 4), prompt);
  while (engine->statistics().slots_used == 0) std::this_thread::yield();
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

Request in_session(Request request, const std::string& from, const std::string& save_as) {
  request.session = from;
  request.save_as = save_as;
  return request;
}

TEST(EngineSessions, RewindingGivesTheSessionThatWas) {
  const auto engine = tiny_engine({.step_tokens = 64});
  const std::string first(150, 'a'), second(90, 'b');
  reply(*engine, in_session(request_of(first, 9), "", "text"));
  engine->fork("text", "before");
  for (const std::int64_t drawn : {0, 1, 6}) {
    reply(*engine, in_session(request_of(second, drawn), "before", "shorter" + std::to_string(drawn)));
  }
  reply(*engine, in_session(request_of(second, 12), "text", "text"));
  EXPECT_EQ(engine->session("text").tokens, 150 + 9 + 90 + 12);
  EXPECT_EQ(engine->session("text").rewindable, 90 + 12);
  engine->rewind("text", 0);
  for (const std::int64_t drawn : {6, 1, 0}) {
    engine->rewind("text", engine->session("text").rewindable - 90 - drawn);
    EXPECT_EQ(engine->save("text"), engine->save("shorter" + std::to_string(drawn))) << drawn;
  }
  engine->rewind("text", 20);  // into the prompt
  EXPECT_EQ(engine->session("text").rewindable, 70);
  engine->rewind("text", 70);
  EXPECT_EQ(engine->save("text"), engine->save("before"));
  EXPECT_EQ(engine->session("text").rewindable, 0);
  test::expect_error([&] { engine->rewind("text", 1); }, "tokens", "expected 0 to 0");
}

// Log-probabilities of a fixed text after a session.
std::vector<float> scores_after(Engine& engine, const std::string& session) {
  auto request = in_session(request_of("What follows?", 0), session, "");
  request.echo = true;
  request.logprobs = 0;
  std::vector<float> scores;
  for (const auto bits : reply(engine, request).echo) scores.push_back(std::bit_cast<float>(bits));
  return {scores.end() - 12, scores.end()};
}

float largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0.0F;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

TEST(EngineSessions, ATurnEndsInPlaceOfWhatEndedTheReply) {
  const auto engine = tiny_engine({.step_tokens = 64});
  const std::string prompt(640, 'p');
  auto request = request_of(prompt, 30);
  for (std::int32_t id = 0; id < 258; ++id) {
    if (id < 'a' || id > 'z') request.sampling.logit_bias[id] = -100.0;
  }
  const auto text = reply(*engine, request).text;
  ASSERT_EQ(text.size(), 30U);
  struct Case {
    std::vector<std::string> stop;
    std::vector<std::int32_t> stop_ids;
    std::string kept;
  };
  const std::string stop = text.substr(20, 5);
  const std::string kept = text.substr(0, text.find(stop));
  const auto by_id = static_cast<std::int32_t>(text[9]);
  const std::vector<Case> cases{
      {{}, {}, text},
      {{}, {by_id}, text.substr(0, text.find(text[9]))},
      {{stop}, {}, kept},
      // Strings that begin earlier, but do not end.
      {{stop, text.substr(18, 4) + "0", text.substr(12, 9) + "0"}, {}, kept},
      {{text.substr(0, 3)}, {}, ""},
  };
  for (const auto& [strings, ids, rest] : cases) {
    for (const std::string end : {"", "!", "\nUser: "}) {
      request.stop = strings;
      request.stop_ids = ids;
      request.end_turn = end;
      const auto steps = engine->statistics().steps;
      const auto got = reply(*engine, in_session(request, "", "closed"));
      // The prompt is not computed again: one step per 64 of its tokens, one per token drawn, and the end.
      EXPECT_LE(engine->statistics().steps - steps, prompt.size() / 64 + got.ids.size() + 4);
      EXPECT_EQ(got.text, rest);
      EXPECT_EQ(engine->session("closed").tokens, static_cast<std::int64_t>((prompt + rest + end).size()));
      reply(*engine, in_session(request_of(prompt + rest + end, 0), "", "whole"));
      reply(*engine, in_session(request_of(prompt + rest + end + "a", 0), "", "longer"));
      const auto scores = scores_after(*engine, "closed");
      EXPECT_LT(largest_difference(scores, scores_after(*engine, "whole")), 1e-3F) << rest << end;
      EXPECT_GT(largest_difference(scores, scores_after(*engine, "longer")), 1e-2F) << rest << end;
      if (end.size() > 1) {
        request.end_turn = end.substr(0, end.size() - 2);
        reply(*engine, in_session(request, "", "shorter"));
        engine->rewind("closed", 2);
        EXPECT_EQ(engine->save("closed"), engine->save("shorter")) << rest;
      }
    }
  }
}

TEST(EngineSessions, SavedBytesAreASessionOfGenerate) {
  const auto engine = tiny_engine();
  reply(*engine, in_session(request_of("Some text", 5), "", "one"));
  const auto bytes = engine->save("one");
  const test::TempFolder folder;
  std::ofstream(folder.file("one"), std::ios::binary) << bytes;
  const auto model = test::tiny_model();
  const auto session = generate::load_session(folder.file("one"), model);
  EXPECT_EQ(session.state.tokens, 9 + 4);
  generate::save_session(folder.file("two"), session, model);
  std::ifstream in(folder.file("two"), std::ios::binary);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), bytes);

  engine->load("two", bytes);
  const auto next = request_of(" more", 6);
  EXPECT_EQ(reply(*engine, in_session(next, "one", "")), reply(*engine, in_session(next, "two", "")));
  EXPECT_EQ(engine->session("two").tokens, 14);

  EXPECT_THROW(engine->load("three", bytes.substr(0, bytes.size() - 9)), IoError);
  auto other = tiny_engine({}, 2);
  test::expect_error([&] { other->load("one", bytes); }, "session", "a session of this model");
  engine->erase("two");
  EXPECT_THROW(engine->erase("two"), NoSuchSession);
  EXPECT_THROW(engine->save("two"), NoSuchSession);
  EXPECT_THROW(engine->submit(in_session(next, "two", ""), std::make_shared<Recorder>()), NoSuchSession);
  test::expect_error([&] { engine->load("no/name", bytes); }, "session", "letters");
  test::expect_error([&] { engine->fork("one", "one"); }, "copy", "which exists");
}

TEST(EngineSessions, ASessionThatIsAdvancedIsLockedAndKeptIfTheRequestIsCancelled) {
  const auto engine = tiny_engine();
  reply(*engine, in_session(request_of("Some text", 5), "", "one"));
  const auto before = engine->save("one");
  const auto recorder = std::make_shared<Recorder>();
  const auto id = engine->submit(in_session(request_of("x", 1 << 20), "one", "one"), recorder);
  EXPECT_TRUE(engine->session("one").in_use);
  EXPECT_THROW(engine->submit(in_session(request_of("x", 1), "one", "one"), std::make_shared<Recorder>()),
               SessionInUse);
  EXPECT_THROW(engine->erase("one"), SessionInUse);
  EXPECT_THROW(engine->rewind("one", 1), SessionInUse);
  EXPECT_EQ(reply(*engine, in_session(request_of("x", 3), "one", "two")).ids.size(), 3U);  // reading is allowed
  engine->cancel(id);
  EXPECT_EQ(recorder->record().reason, FinishReason::cancelled);
  EXPECT_EQ(engine->save("one"), before);
  EXPECT_FALSE(engine->session("one").in_use);
}

TEST(EngineSessions, IdleSessionsMoveToFiles) {
  const test::TempFolder folder;
  const auto slot = tiny_engine()->info().session_bytes;
  const std::size_t records = 2000;  // room for a text's ids and what sampling needs, and less than a state
  ASSERT_LT(2 * records, slot);
  const auto engine = tiny_engine({.session_memory = slot + records, .swap_folder = folder.path()});
  for (const std::string name : {"a", "b", "c"}) reply(*engine, in_session(request_of(name, 3), "", name));
  EXPECT_FALSE(engine->session("a").in_memory);
  EXPECT_TRUE(engine->session("c").in_memory);
  EXPECT_EQ(engine->statistics().swapped_bytes, 2 * (slot + 4 * sizeof(std::int32_t)));
  EXPECT_EQ(reply(*engine, in_session(request_of("x", 4), "a", "")).ids.size(), 4U);
  for (const std::string name : {"a", "b", "c"}) engine->erase(name);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));

  const auto promised = tiny_engine({.session_memory = slot + records});
  const auto running = std::make_shared<Recorder>();
  const auto id = promised->submit(in_session(request_of("a", 1 << 20), "", "a"), running);
  EXPECT_THROW(promised->submit(in_session(request_of("b", 3), "", "b"), std::make_shared<Recorder>()), NoRoom);
  promised->cancel(id);
  EXPECT_EQ(running->record().reason, FinishReason::cancelled);

  const auto full = tiny_engine({.session_memory = slot + records});
  reply(*full, in_session(request_of("a", 3), "", "a"));
  test::expect_error([&] { full->submit(in_session(request_of("b", 3), "", "b"), std::make_shared<Recorder>()); },
                     "session_memory", "swap_folder");
}

TEST(EngineSessions, ADiskThatFailsLosesNoReplyThatIsFinished) {
  const test::TempFolder folder;
  const auto slot = tiny_engine()->info().session_bytes;
  const auto swap = folder / "swap";
  const auto engine = tiny_engine({.session_memory = slot + 2000, .swap_folder = swap});
  reply(*engine, in_session(request_of("a", 3), "", "a"));
  const auto running = std::make_shared<Recorder>();
  std::filesystem::remove(swap);
  // Whoever needs room learns of it, before its request begins.
  EXPECT_THROW(engine->submit(in_session(request_of("b", 3), "", "b"), running), IoError);
  EXPECT_EQ(engine->sessions().size(), 1U);
  std::filesystem::create_directory(swap);
  engine->submit(in_session(request_of("b", 3), "", "b"), running);
  EXPECT_EQ(running->record().reason, FinishReason::length);
  EXPECT_FALSE(engine->session("a").in_memory);
}

TEST(EngineSessions, IdsOfTextsCountAsSessionMemory) {
  const test::TempFolder folder;
  const auto slot = tiny_engine()->info().session_bytes;
  const std::size_t ids = 50'000;
  const auto prompt = std::string(ids, 'x');
  const auto engine = tiny_engine({.session_memory = 3 * slot});
  reply(*engine, in_session(request_of("a", 3), "", "a"));
  const auto before = engine->statistics().session_bytes;
  EXPECT_EQ(engine->session("a").bytes, before);
  ASSERT_GT(before + ids * sizeof(std::int32_t), 3 * slot);
  EXPECT_THROW(engine->submit(in_session(request_of(prompt, 3), "", "b"), std::make_shared<Recorder>()), NoRoom);
  EXPECT_EQ(engine->statistics().session_bytes, before);

  const auto swapping = tiny_engine({.session_memory = 2 * slot, .swap_folder = folder.path()});
  for (const std::string name : {"a", "b", "c"}) reply(*swapping, in_session(request_of(prompt, 3), "", name));
  EXPECT_GE(swapping->session("c").bytes, slot + ids * sizeof(std::int32_t));
  reply(*swapping, in_session(request_of("x", 3), "", "d"));
  EXPECT_EQ(swapping->statistics().swapped_bytes, 3 * (slot + (ids + 3) * sizeof(std::int32_t)));
  EXPECT_LE(swapping->statistics().session_bytes, 2 * slot);
  swapping->rewind("a", 3);
  EXPECT_EQ(swapping->session("a").tokens, static_cast<std::int64_t>(ids));
}

TEST(EngineSessions, TheLongestUnusedDisposableSessionsMakeRoom) {
  const auto slot = tiny_engine()->info().session_bytes;
  const auto named = [](std::vector<SessionInfo> sessions) {
    std::string names;
    for (const auto& session : sessions) names += session.name;
    return names;
  };
  const auto engine = tiny_engine({.session_memory = 4 * slot + 4000, .max_disposable = 3});
  const auto store = [&](const std::string& name, const std::string& from, bool disposable) {
    auto request = in_session(request_of("x", 2), from, name);
    request.disposable = disposable;
    EXPECT_EQ(reply(*engine, request).reason, FinishReason::length);
  };
  for (const std::string name : {"a", "b", "c"}) store(name, "", true);
  store("N", "", false);
  EXPECT_EQ(named(engine->sessions()), "Nabc");
  EXPECT_TRUE(engine->session("a").disposable);
  EXPECT_EQ(engine->session("a").rewindable, 0);
  reply(*engine, in_session(request_of("x", 2), "a", ""));  // a use
  store("d", "", true);
  EXPECT_EQ(named(engine->sessions()), "Nacd");
  store("e", "d", true);  // continues one that must stay until it has ended
  EXPECT_EQ(named(engine->sessions()), "Nade");
  for (const std::string name : {"O", "P", "Q"}) store(name, "", false);
  EXPECT_EQ(named(engine->sessions()), "NOPQ");
  EXPECT_THROW(store("R", "", false), NoRoom);

  const auto many = tiny_engine({.max_disposable = 2});
  for (const std::string name : {"a", "b", "c"}) {
    auto request = in_session(request_of("x", 2), "", name);
    request.disposable = name != "c";
    reply(*many, request);
  }
  many->make_disposable("c");
  EXPECT_EQ(named(many->sessions()), "bc");

  // Sessions in use, and copies of one with another name, set no memory free.
  const auto kept = tiny_engine({.session_memory = 2 * slot + 2000});
  auto request = in_session(request_of("x", 2), "", "a");
  request.disposable = true;
  reply(*kept, request);
  kept->fork("a", "copy");
  reply(*kept, in_session(request_of("x", 2), "", "b"));
  EXPECT_THROW(kept->submit(in_session(request_of("x", 2), "", "c"), std::make_shared<Recorder>()), NoRoom);
  EXPECT_EQ(named(kept->sessions()), "abcopy");
}

TEST(Engine, RefusesWhatItCannotDo) {
  const auto slot = tiny_engine()->info().session_bytes;
  test::expect_error([&] { tiny_engine({.state_memory = slot - 1}); }, "state_memory", "bytes of one text's state");
  test::expect_error([&] { tiny_engine({.state_memory = std::size_t{1} << 60}); }, "state_memory", "machine's memory");
  test::expect_error([&] { tiny_engine({.step_tokens = 100}); }, "step_tokens", "a multiple of 64");
  test::expect_error([&] { tiny_engine({.weights = "int3"}); }, "weights", "int8");
  const auto engine = tiny_engine({.state_memory = slot, .max_queue = 2});
  const auto refused = [&](auto change, const std::string& field) {
    Request request = request_of("x", 1);
    change(request);
    test::expect_error([&] { engine->submit(request, std::make_shared<Recorder>()); }, field, "expected");
  };
  refused([](Request& r) { r.prompt.clear(); }, "prompt");
  refused([](Request& r) { r.prompt = {258}; }, "prompt");
  refused([](Request& r) { r.max_tokens = -1; }, "max_tokens");
  refused([](Request& r) { r.logprobs = 21; }, "logprobs");
  refused([](Request& r) { r.stop = {""}; }, "stop");
  refused([](Request& r) { r.sampling.top_p = 0.0; }, "top_p");
  refused([](Request& r) { r.sampling.temperature = NAN; }, "temperature");
  refused([](Request& r) { r.sampling.logit_bias = {{300, 1.0}}; }, "logit_bias");
  refused([](Request& r) { r.save_as = "a b"; }, "session");
  const auto listener = std::make_shared<Recorder>();
  EXPECT_THROW(
      {
        for (int i = 0; i < 5; ++i) engine->submit(request_of("x", 1 << 20), listener);
      },
      QueueFull);
}

}  // namespace
}  // namespace efla::serve
