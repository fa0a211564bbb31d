// The engine over models of families, whose texts take pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/engine/family_model.h"
#include "tests/engine/recorder.h"
#include "tests/support/expect_error.h"
#include "tests/support/killed_work.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {
namespace {

// A model of olmo_hybrid or of qwen3_5_text, and the type of keys and values.
class FamilyEngine : public testing::TestWithParam<std::tuple<bool, std::string>> {
 protected:
  std::unique_ptr<Engine> engine(EngineOptions options = {}) const {
    options.kv_cache_type = std::get<1>(GetParam());
    return folder.engine(options);
  }
  static Request drawn(std::int64_t i) {
    auto request = request_of(std::string(static_cast<std::size_t>(1 + i * 37 % 150), static_cast<char>('a' + i)), 9);
    request.sampling.temperature = i % 3 == 0 ? 0.0 : 1.0;
    request.sampling.seed = static_cast<std::uint64_t>(i);
    return request;
  }

  const FamilyFolder folder{std::get<0>(GetParam())};
};

TEST_P(FamilyEngine, TextsTogetherAreTheTextsAlone) {
  std::vector<Record> alone;
  {
    const auto one = engine({.cache_memory = 0, .draft_tokens = 0, .threads = 1});
    for (std::int64_t i = 0; i < 12; ++i) alone.push_back(reply(*one, drawn(i)));
  }
  for (const std::int64_t step_tokens : {64, 512}) {
    const auto together = engine({.step_tokens = step_tokens, .threads = 2});
    for (int round = 0; round < 2; ++round) {  // the second one begins from the prefix cache
      std::vector<std::shared_ptr<Recorder>> recorders;
      for (std::int64_t i = 0; i < 12; ++i) {
        recorders.push_back(std::make_shared<Recorder>());
        together->submit(drawn(i), recorders.back());
      }
      for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(recorders[i]->record(), alone[i]) << i;
    }
    EXPECT_GT(together->statistics().cache_hits, 0U);
  }
  for (const auto& record : alone) {
    for (const auto id : record.ids) EXPECT_LT(id, 258);  // padding rows are not drawn
  }
}

// Writes a model whose next token depends on the last one alone, with a draft head that is always right for greedy
// replies, or with a random one.
void write_drafting_folder(const std::filesystem::path& folder, bool right) {
  auto config = nn::random_family_config(false, 11);
  config["vocab_size"] = 300;
  std::vector<std::string> layers(8, "linear_attention");  // enough for the head to cost little beside them
  layers.back() = "full_attention";
  config["layer_types"] = layers;
  config["num_hidden_layers"] = layers.size();
  auto tensors = nn::random_family_tensors(config, "model.", 12);
  nn::add_draft_head(tensors, config);
  if (right) {
    for (auto& [name, tensor] : tensors.all) {
      const auto ends = [&](const char* end) { return name.ends_with(std::string(end) + ".weight"); };
      if (ends("out_proj") || ends("o_proj") || ends("down_proj") || ends("mtp.fc") || ends("pre_fc_norm_embedding")) {
        std::ranges::fill(tensor.values, 0.0F);
      }
    }
    const auto width = config["hidden_size"].get<std::size_t>();
    for (std::size_t i = 0; i < width; ++i) tensors.all.at("mtp.fc.weight").values[i * 2 * width + i] = 1.0F;
    tensors.all.at("mtp.norm.weight") = tensors.all.at("model.norm.weight");
  }
  nn::write_family_folder(folder, config, tensors, false, false);
}

TEST(DraftHeadEngine, DraftsOfTheHeadChangeNoBit) {
  for (const bool right : {false, true}) {
    const test::TempFolder folder;
    write_drafting_folder(folder.path(), right);
    const auto start = [&](std::int64_t draft_head, std::int64_t draft_tokens) {
      return load_engine(folder.path(), data::load_tokenizer("bytes"),
                         {.draft_tokens = draft_tokens, .draft_head = draft_head});
    };
    const auto none = start(0, 0), head = start(7, 0), both = start(3, 7);
    for (const double temperature : {0.0, 1.0}) {
      auto request = in_session(request_of(std::string(60, 'x') + "a prompt", 80), "", "s");
      request.sampling.temperature = temperature;
      request.sampling.seed = 5;
      const auto expected = reply(*none, request);
      auto more = in_session(request_of("more", 20), "s", "s");
      const auto expected_more = reply(*none, more);
      for (const auto& engine : {std::cref(head), std::cref(both)}) {
        EXPECT_EQ(reply(*engine.get(), request), expected);
        EXPECT_EQ(reply(*engine.get(), more), expected_more);
      }
      head->load("loaded", head->save("s"));
      EXPECT_EQ(head->save("loaded"), head->save("s"));
    }
    const auto drafted = head->statistics();
    EXPECT_GT(drafted.drafted_tokens, 0U);
    EXPECT_EQ(none->statistics().drafted_tokens, 0U);
    if (right) {  // how many tokens are drafted depends on times
      EXPECT_GT(drafted.accepted_tokens, 0U);
      EXPECT_LT(drafted.steps, none->statistics().steps);
    }
  }
  const FamilyFolder without(false);
  test::expect_error([&] { without.engine({.draft_head = 1}); }, "draft_head", "mtp");
}

TEST(FamilyEngines, AModelMayHaveAttentionOnly) {
  const FamilyFolder folder(false, {"full_attention"});
  const auto engine = folder.engine(), other = folder.engine();
  reply(*engine, in_session(request_of("a text", 9), "", "s"));
  other->load("s", engine->save("s"));
  const auto more = in_session(request_of("more", 9), "s", "s");
  EXPECT_EQ(reply(*other, more), reply(*engine, more));
}

// A chat of an agent, with and without a head for drafts: each turn and each branch begins from the state at the end of
// the longest earlier prompt with the same beginning, and the states share its pages.
TEST(FamilyEngines, AGrowingChatHitsTheCacheAtEveryTurnAndBranch) {
  const FamilyFolder folder(false, {"linear_attention", "full_attention"}, true);
  for (const std::int64_t draft_head : {0, 3}) {
    const auto cached = folder.engine({.draft_head = draft_head});
    const auto plain = folder.engine({.cache_memory = 0, .draft_head = draft_head});
    const auto hits = [&](const std::string& prompt) {
      const auto request = request_of(prompt, 12);
      const auto before = cached->statistics().cache_hits;
      EXPECT_EQ(reply(*cached, request), reply(*plain, request));
      return cached->statistics().cache_hits - before;
    };
    const auto known = [](std::size_t tokens) { return (tokens - 1) / 64 * 64; };
    std::vector<std::string> turns{std::string(200, 's')};
    EXPECT_EQ(hits(turns[0]), 0U);
    for (std::size_t i = 1; i < 20; ++i) {
      turns.push_back(turns.back() + std::string(65 + i * 37 % 150, static_cast<char>('a' + i)));
      EXPECT_EQ(hits(turns[i]), known(turns[i - 1].size())) << "turn " << i;
    }
    const auto now = cached->statistics();
    const auto pages = known(turns.back().size()) / 64;
    EXPECT_EQ(now.cache_entries, 20);
    EXPECT_EQ(now.cache_bytes, 20 * now.slot_bytes + pages * now.page_bytes);
    for (const std::size_t i : {15, 4, 15}) {
      EXPECT_EQ(hits(turns[i] + "other" + std::to_string(i)), known(turns[i].size())) << "branch at " << i;
    }
  }
}

TEST_P(FamilyEngine, ASessionSavedAndLoadedInAnotherEngineGoesOn) {
  const auto first = engine(), second = engine();
  auto request = drawn(5);
  request.save_as = "text";
  request.to_be_continued = true;
  const auto begun = reply(*first, request);
  first->fork("text", "other");
  second->load("text", first->save("text"));
  auto more = drawn(5);
  more.prompt.clear();
  more.session = "text";
  more.sampling.draws = first->session("text").draws;
  auto whole = drawn(5);
  whole.max_tokens *= 2;
  const auto expected = reply(*first, whole);
  const auto rest = reply(*second, more);
  auto ids = begun.ids;
  ids.insert(ids.end(), rest.ids.begin(), rest.ids.end());
  EXPECT_EQ(ids, expected.ids);
  more.session = "other";
  EXPECT_EQ(reply(*first, more).ids, rest.ids);
}

TEST_P(FamilyEngine, ASessionGoesOnWithItsTypeOfKeysAndValuesOnly) {
  const auto type = std::get<1>(GetParam());
  const std::string other_type = type == "float32" ? "bfloat16" : "float32";
  const test::TempFolder sessions;
  const auto other = folder.engine({.kv_cache_type = other_type});
  auto own = engine({.sessions = sessions.path()});
  EXPECT_EQ(own->info().kv_cache_type, type);
  EXPECT_EQ(own->info().session_bytes, other->info().session_bytes);
  const auto narrow = std::min(own->info().token_bytes, other->info().token_bytes);
  EXPECT_EQ(own->info().token_bytes, type == "float32" ? 2 * narrow : narrow);
  reply(*own, in_session(request_of("x", 3), "", "text"));
  test::expect_error([&] { other->load("text", own->save("text")); }, "session", "keys and values in");
  own.reset();
  test::expect_error([&] { folder.engine({.sessions = sessions.path(), .kv_cache_type = other_type}); }, "sessions",
                     "keys and values in " + other_type);
  test::expect_error([&] { folder.engine({.kv_cache_type = "int8"}); }, "kv_cache_type", "float32 or bfloat16");
}

// Eight replies to a prompt of 15 full pages need more pages than there are, unless they share these.
TEST_P(FamilyEngine, RepliesToOnePromptShareItsPages) {
  constexpr std::size_t kReplies = 8, kTokens = 60;
  const auto whole = engine();
  const auto constant = whole->info().session_bytes, page = 64 * whole->info().token_bytes;
  const auto one =
      engine({.state_memory = kReplies * constant + std::max(55 * page, kReplies * constant), .max_texts = kReplies});
  std::atomic<std::size_t> begun = 0;
  std::vector<std::shared_ptr<Listener>> listeners;
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (std::size_t i = 0; i < kReplies; ++i) {
    recorders.push_back(std::make_shared<Recorder>([&](std::size_t tokens) {
      if (tokens == 1) ++begun;
      if (tokens == kTokens) {
        EXPECT_EQ(begun, kReplies);
      }
    }));
    listeners.push_back(recorders.back());
  }
  const auto request = request_of(std::string(1000, 'x'), kTokens);
  one->submit(request, listeners);
  for (std::size_t i = 0; i < kReplies; ++i) {
    auto alone = request;
    alone.sampling.seed += i;
    EXPECT_EQ(recorders[i]->record(), reply(*whole, alone));
  }
}

// Sessions of a long text, of which each continues the one before.
TEST_P(FamilyEngine, ASessionSharesThePagesOfTheTextThatItContinues) {
  constexpr std::int64_t kTokens = 1000, kSessions = 6;
  constexpr std::size_t kRecords = 2000;  // at most, of a session's ids and of what sampling needs
  const test::TempFolder swap;
  const auto one = engine({.cache_memory = 0});
  const auto constant = one->info().session_bytes, page = 64 * one->info().token_bytes;
  const auto store = [&](Engine& engine, std::int64_t i) {
    auto request = i == 0 ? request_of(std::string(kTokens, 'x'), 3) : request_of("more", 3);
    request.session = i == 0 ? "" : "s" + std::to_string(i - 1);
    request.save_as = "s" + std::to_string(i);
    request.cache_after = {512, 768};
    EXPECT_EQ(reply(engine, request).error, "");
  };
  for (std::int64_t i = 0; i < kSessions; ++i) store(*one, i);
  const auto pages = (kTokens + kSessions * 8) / 64 * page;
  EXPECT_GT(one->statistics().session_bytes, kSessions * constant + pages);
  EXPECT_LT(one->statistics().session_bytes, kSessions * (constant + page + kRecords) + pages + 4 * kTokens);
  EXPECT_GT(one->session("s0").bytes, constant + kTokens / 64 * page);

  // The states of the prefix cache after 512, 768 and 960 tokens have 15 pages together.
  const auto small = engine({.session_memory = 3 * (constant + page + kRecords),
                             .cache_memory = 3 * constant + 15 * page,
                             .swap = swap.path()});
  for (std::int64_t i = 0; i < kSessions; ++i) store(*small, i);
  EXPECT_EQ(small->statistics().cache_bytes, 3 * constant + 15 * page);
  EXPECT_LT(small->statistics().session_bytes, 3 * (constant + page + kRecords));
  EXPECT_LT(small->statistics().swapped_bytes, kSessions * (constant + page) + pages + 8 * kTokens);
  for (std::int64_t i = 0; i < kSessions; ++i) {
    const auto name = "s" + std::to_string(i);
    EXPECT_EQ(small->save(name), one->save(name)) << name;
    if (i > 0) small->erase("s" + std::to_string(i - 1));
  }
  EXPECT_EQ(reply(*small, in_session(request_of("end", 9), "s5", "")),
            reply(*one, in_session(request_of("end", 9), "s5", "")));
}

// Sessions that continue one text, in an engine whose memory is for the pages that they share.
TEST_P(FamilyEngine, SessionsShareTheirPagesAgainAfterARestart) {
  const test::TempFolder sessions;
  auto one = engine({.cache_memory = 0, .sessions = sessions.path()});
  reply(*one, in_session(request_of(std::string(1000, 'x'), 3), "", "text"));
  const std::vector<std::string> names{"a", "b", "c", "d"};
  for (const auto& name : names) reply(*one, in_session(request_of(name, 3), "text", name));
  std::vector<std::string> saved;
  for (const auto& name : names) saved.push_back(one->save(name));
  const auto bytes = one->statistics().session_bytes;
  const auto next = one->info().session_bytes + 64 * one->info().token_bytes;  // of a state that takes another's place
  one.reset();
  one = engine({.session_memory = bytes + next, .cache_memory = 0, .sessions = sessions.path()});
  EXPECT_LE(one->statistics().session_bytes, bytes);
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(one->save(names[i]), saved[i]);
  for (const auto& name : names) one->load(name, saved[0]);
  EXPECT_LE(one->statistics().session_bytes, bytes);
}

// The session "book" grows by two pages per request until the process is killed. The file then has each reply that has
// ended, and goes on to the text that an engine writes that was not killed.
TEST_P(FamilyEngine, AKilledEngineKeepsEveryReplyThatHasEnded) {
  const test::TempFolder sessions;
  const auto next = [](std::int64_t turn) {
    auto request = drawn(turn);
    request.prompt.resize(128, 'b');
    request.session = turn == 0 ? "" : "book";
    request.save_as = "book";
    return request;
  };
  const auto turns = [](const Engine& engine) {
    return engine.sessions().empty() ? 0 : engine.session("book").tokens / (128 + 9);
  };
  const auto whole = engine();
  std::int64_t done = 0, confirmed = 0;
  for (const int ms : {3, 11, 24}) {
    confirmed += test::confirmed_until_killed(std::chrono::milliseconds(ms), [&](const auto& confirm) {
      const auto own = engine({.sessions = sessions.path(), .threads = 1});
      for (std::int64_t turn = turns(*own); reply(*own, next(turn)).error.empty(); ++turn) confirm();
    });

    const auto started = engine({.sessions = sessions.path()});
    ASSERT_GE(turns(*started), confirmed);
    ASSERT_LE(turns(*started), confirmed + 1);
    confirmed = turns(*started);
    for (; done < confirmed; ++done) reply(*whole, next(done));
    EXPECT_EQ(started->save("book"), whole->save("book"));
    EXPECT_TRUE(started->set_aside().empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyEngine,
                         testing::Combine(testing::Bool(), testing::Values("float32", "bfloat16")),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "olmo_hybrid_" : "qwen3_5_text_") +
                                  std::get<1>(info.param);
                         });

}  // namespace
}  // namespace efla::engine
