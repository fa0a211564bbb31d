// The engine's sessions: rewinding, turns, files, the bound of their memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <vector>

#include "tests/engine/recorder.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {
namespace {

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
  for (const std::int64_t drawn : {6, 1, 0}) {
    rewind(*engine, "text", engine->session("text").rewindable - 90 - drawn);
    EXPECT_EQ(engine->save("text"), engine->save("shorter" + std::to_string(drawn))) << drawn;
  }
  rewind(*engine, "text", 20);  // into the prompt
  EXPECT_EQ(engine->session("text").rewindable, 70);
  rewind(*engine, "text", 70);
  EXPECT_EQ(engine->save("text"), engine->save("before"));
  EXPECT_EQ(engine->session("text").rewindable, 0);
  test::expect_error([&] { rewind(*engine, "text", 1); }, "tokens", "expected 0 to 0");
}

TEST(EngineSessions, ARewindIsARequestLikeOthers) {
  const auto engine = tiny_engine({.step_tokens = 64});
  reply(*engine, in_session(request_of(std::string(1 << 16, 'a'), 2), "", "text"));
  const auto before = engine->save("text");
  const auto recorder = std::make_shared<Recorder>();
  const auto id = engine->submit(rewind_of("text", 3), recorder);
  EXPECT_TRUE(engine->session("text").in_use);
  EXPECT_EQ(reply(*engine, request_of("short", 4)).ids.size(), 4U);
  EXPECT_FALSE(recorder->ended());
  engine->cancel(id);
  EXPECT_EQ(recorder->record().reason, FinishReason::cancelled);
  EXPECT_EQ(engine->save("text"), before);
  EXPECT_FALSE(engine->session("text").in_use);
  auto prompt = rewind_of("text", 3);
  prompt.prompt = {'a'};
  test::expect_error([&] { engine->submit(prompt, recorder); }, "prompt", "none with rewind");
  auto other = rewind_of("text", engine->session("text").rewindable);
  other.save_as = "empty";
  reply(*engine, other);
  EXPECT_EQ(engine->session("empty").tokens, 0);
  EXPECT_EQ(engine->save("text"), before);
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
      request.stop_token_ids = ids;
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
        rewind(*engine, "closed", 2);
        EXPECT_EQ(engine->save("closed"), engine->save("shorter")) << rest;
      }
    }
  }
}

TEST(EngineSessions, SavedBytesAreASession) {
  const auto engine = tiny_engine();
  reply(*engine, in_session(request_of("Some text", 5), "", "one"));
  const auto bytes = engine->save("one");
  engine->load("two", bytes);
  const auto next = request_of(" more", 6);
  EXPECT_EQ(reply(*engine, in_session(next, "one", "")), reply(*engine, in_session(next, "two", "")));
  EXPECT_EQ(engine->session("two").tokens, 14);
  EXPECT_EQ(engine->session("two").last_id, engine->session("one").last_id);

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
  EXPECT_THROW(rewind(*engine, "one", 1), SessionInUse);
  EXPECT_THROW(engine->make_disposable("one"), SessionInUse);
  EXPECT_EQ(reply(*engine, in_session(request_of("x", 3), "one", "two")).ids.size(), 3U);  // reading is allowed
  engine->cancel(id);
  EXPECT_EQ(recorder->record().reason, FinishReason::cancelled);
  EXPECT_EQ(engine->save("one"), before);
  EXPECT_FALSE(engine->session("one").in_use);
}

TEST(EngineSessions, ARequestThatReadTheSessionBeforeAnotherAdvancedItIsRefused) {
  Engine* running = nullptr;
  LocalEngine engine(
      test::tiny_model(),
      std::make_unique<CallingTokenizer>([&] { reply(*running, in_session(request_of("x", 3), "one", "one")); }), {});
  running = &engine;
  reply(engine, in_session(request_of("Some text", 5), "", "one"));
  auto late = in_session(request_of("!", 1), "one", "one");
  EXPECT_THROW(engine.submit(late, std::make_shared<Recorder>()), SessionInUse);
  EXPECT_EQ(engine.session("one").tokens, 9 + 5 + 1 + 3);
  EXPECT_EQ(reply(engine, late).ids.size(), 1U);
}

TEST(EngineSessions, ATextThatCannotBeStoredEndsItsRequestAlone) {
  LocalEngine engine(test::tiny_model(), std::make_unique<CallingTokenizer>([] { throw std::bad_alloc(); }), {});
  auto request = in_session(request_of("x", 3), "", "one");
  request.sampling.logit_bias['!'] = -100.0;
  request.end_turn = "!";
  const auto recorder = std::make_shared<Recorder>();
  engine.submit(request, recorder);
  const auto failed = recorder->end();
  EXPECT_EQ(failed.reason, FinishReason::error);
  EXPECT_EQ(failed.error, "std::bad_alloc");
  EXPECT_TRUE(failed.no_memory);
  EXPECT_TRUE(engine.sessions().empty());
  EXPECT_EQ(reply(engine, request).reason, FinishReason::length);
}

TEST(EngineSessions, IdleSessionsMoveToFiles) {
  const test::TempFolder folder;
  const auto slot = tiny_engine()->info().session_bytes;
  const std::size_t records = 2000;  // room for a text's ids and what sampling needs, and less than a state
  ASSERT_LT(2 * records, slot);
  const auto engine = tiny_engine({.session_memory = slot + records, .swap = folder.path()});
  for (const std::string name : {"a", "b", "c"}) reply(*engine, in_session(request_of(name, 3), "", name));
  EXPECT_FALSE(engine->session("a").in_memory);
  EXPECT_TRUE(engine->session("c").in_memory);
  EXPECT_EQ(engine->statistics().swapped_bytes, 2 * (slot + 4 * sizeof(std::int32_t)));
  EXPECT_EQ(reply(*engine, in_session(request_of("x", 4), "a", "")).ids.size(), 4U);
  for (const std::string name : {"a", "b", "c"}) engine->erase(name);
  for (const auto& file : std::filesystem::directory_iterator(folder.path()))
    EXPECT_NE(file.path().extension(), kSwapEnd);

  const auto promised = tiny_engine({.session_memory = slot + records});
  const auto running = std::make_shared<Recorder>();
  const auto id = promised->submit(in_session(request_of("a", 1 << 20), "", "a"), running);
  EXPECT_THROW(promised->submit(in_session(request_of("b", 3), "", "b"), std::make_shared<Recorder>()), NoRoom);
  promised->cancel(id);
  EXPECT_EQ(running->record().reason, FinishReason::cancelled);

  const auto full = tiny_engine({.session_memory = slot + records});
  reply(*full, in_session(request_of("a", 3), "", "a"));
  test::expect_error([&] { full->submit(in_session(request_of("b", 3), "", "b"), std::make_shared<Recorder>()); },
                     "session_memory", "or in swap a folder");
}

TEST(EngineSessions, RequestsThatWaitTogetherStayWithinTheMemory) {
  const test::TempFolder folder;
  const auto slot = tiny_engine()->info().session_bytes;
  const std::size_t texts = 12, memory = 3 * slot + texts * 1000;  // with what sampling needs of each text
  const auto engine = tiny_engine({.state_memory = slot, .session_memory = memory, .swap = folder.path()});
  std::vector<std::shared_ptr<Recorder>> replies;
  for (std::size_t i = 0; i < texts; ++i) {
    replies.push_back(std::make_shared<Recorder>());
    engine->submit(in_session(request_of("x", 3), "", "s" + std::to_string(i)), replies.back());
  }
  for (const auto& recorder : replies) EXPECT_EQ(recorder->record().reason, FinishReason::length);
  EXPECT_EQ(engine->sessions().size(), texts);
  EXPECT_LE(engine->statistics().session_bytes, memory);
}

TEST(EngineSessions, RewindingAForkStaysWithinTheMemory) {
  const auto unbounded = tiny_engine();
  const auto slot = unbounded->info().session_bytes;
  const std::size_t records = 4000;
  const auto make = [](Engine& engine) {
    reply(engine, in_session(request_of("Some text", 5), "", "text"));
    engine.fork("text", "b");
    engine.fork("text", "c");
  };
  make(*unbounded);
  rewind(*unbounded, "b", 2);
  rewind(*unbounded, "c", 3);

  const auto engine = tiny_engine({.session_memory = 2 * slot + records});
  make(*engine);
  rewind(*engine, "b", 2);
  EXPECT_THROW(rewind(*engine, "c", 3), NoRoom);  // a third state
  EXPECT_EQ(engine->save("c"), engine->save("text"));
  EXPECT_FALSE(engine->session("c").in_use);
  engine->erase("b");
  rewind(*engine, "c", 3);
  EXPECT_EQ(engine->save("c"), unbounded->save("c"));
  EXPECT_EQ(engine->save("text"), unbounded->save("text"));
  EXPECT_LE(engine->statistics().session_bytes, 2 * slot + records);

  const test::TempFolder folder;
  const auto swapping = tiny_engine({.session_memory = slot + records, .swap = folder.path()});
  make(*swapping);
  rewind(*swapping, "b", 2);
  rewind(*swapping, "c", 3);
  for (const std::string name : {"text", "b", "c"}) EXPECT_EQ(swapping->save(name), unbounded->save(name)) << name;
  EXPECT_LE(swapping->statistics().session_bytes, slot + records);
}

TEST(EngineSessions, ADiskThatFailsLosesNoReplyThatIsFinished) {
  const test::TempFolder folder;
  const auto slot = tiny_engine()->info().session_bytes;
  const auto swap = folder / "swap";
  const auto engine = tiny_engine({.session_memory = slot + 2000, .swap = swap});
  reply(*engine, in_session(request_of("a", 3), "", "a"));
  const auto running = std::make_shared<Recorder>();
  std::filesystem::remove_all(swap);
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

  const auto swapping = tiny_engine({.session_memory = 2 * slot, .swap = folder.path()});
  for (const std::string name : {"a", "b", "c"}) reply(*swapping, in_session(request_of(prompt, 3), "", name));
  EXPECT_GE(swapping->session("c").bytes, slot + ids * sizeof(std::int32_t));
  reply(*swapping, in_session(request_of("x", 3), "", "d"));
  EXPECT_EQ(swapping->statistics().swapped_bytes, 3 * (slot + (ids + 3) * sizeof(std::int32_t)));
  EXPECT_LE(swapping->statistics().session_bytes, 2 * slot);
  rewind(*swapping, "a", 3);
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

}  // namespace
}  // namespace efla::engine
