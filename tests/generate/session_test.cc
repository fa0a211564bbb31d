// Sessions: a text that is saved and resumed is the text of one run.
#include "efla/generate/session.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "efla/generate/generator.h"
#include "tests/generate/tiny_model.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::generate {
namespace {

using test::tiny_model;

const SamplingOptions kWarm{.temperature = 1.2, .repetition_penalty = 1.3};

TEST(Session, GoesOnAsOneUninterruptedRun) {
  const test::TempFolder folder;
  const auto tokenizer = data::load_tokenizer("bytes");
  for (const bool hybrid : {false, true}) {
    const auto model = tiny_model(5, hybrid);
    const Generator generator(model, *tokenizer);
    Session whole(model, 9);
    const auto prompt = generator.encode(whole, "Ein Bär", false);
    // Bytes at random: characters of several bytes begin, break off and end at every place.
    const auto expected = generator.reply(whole, prompt, {.sampling = kWarm, .max_tokens = 120});
    std::vector<std::int32_t> ids;
    std::string text;
    for (int part = 0; part < 40; ++part) {
      Session session = part == 0 ? Session(model, 9) : load_session(folder.file("session"), model);
      const ReplyOptions options{
          .sampling = kWarm, .max_tokens = 3, .stop = {"\n\n\n", "the end"}, .to_be_continued = part < 39};
      const auto reply = generator.reply(session, part == 0 ? prompt : std::vector<std::int32_t>(), options);
      ids.insert(ids.end(), reply.ids.begin(), reply.ids.end());
      text += reply.text;
      save_session(folder.file("session"), session, model);
    }
    EXPECT_EQ(ids, expected.ids);
    EXPECT_EQ(text, expected.text);
  }
}

TEST(Session, AStopStringIsFoundAcrossRuns) {
  const test::TempFolder folder;
  const auto tokenizer = data::load_tokenizer("bytes");
  const auto model = tiny_model(6);
  const Generator generator(model, *tokenizer);
  const SamplingOptions greedy{.repetition_penalty = 1.5};
  Session whole(model, 0);
  const auto prompt = generator.encode(whole, "x", false);
  const auto ids = generator.reply(whole, prompt, {.sampling = greedy, .max_tokens = 12}).ids;
  // Two characters of the text, one on each side of the cut.
  std::size_t cut = 1;
  while (cut < 11 && (ids[cut - 1] >= 128 || ids[cut] >= 128)) ++cut;
  ASSERT_LT(cut, 11U);
  const std::string stop{static_cast<char>(ids[cut - 1]), static_cast<char>(ids[cut])};
  ReplyOptions options{
      .sampling = greedy, .max_tokens = static_cast<std::int64_t>(cut), .stop = {stop}, .to_be_continued = true};
  Session session(model, 0);
  const auto first = generator.reply(session, prompt, options);
  EXPECT_EQ(first.end, ReplyEnd::max_tokens);
  EXPECT_EQ(session.held, stop.substr(0, 1));
  save_session(folder.file("session"), session, model);
  Session loaded = load_session(folder.file("session"), model);
  const auto second = generator.reply(loaded, {}, options);
  EXPECT_EQ(second.end, ReplyEnd::stop_string);
  EXPECT_EQ(second.ids.size(), 1U);
  EXPECT_EQ(second.text, "");
}

TEST(Session, ItsFileDoesNotGrowWithTheText) {
  const test::TempFolder folder;
  const auto size_after = [&](const nn::LanguageModel& model, std::int64_t tokens) {
    Session session(model, 1);
    session.pending.assign(tokens, 'a');
    test::next_id(model, session, 256);
    for (int i = 0; i < 3; ++i) session.last_ids.push_back('a');
    return save_session(folder.file("session"), session, model);
  };
  const auto recurrent = tiny_model(7), hybrid = tiny_model(7, true);
  EXPECT_EQ(size_after(recurrent, 5), size_after(recurrent, 5000));
  EXPECT_LT(size_after(hybrid, 5), size_after(hybrid, 500));
}

TEST(Session, RefusesAnotherModelsAndOtherFiles) {
  const test::TempFolder folder;
  const auto model = tiny_model(8);
  Session session(model, 1);
  session.pending = {1, 2, 3};
  test::next_id(model, session, 256);
  const auto path = folder.file("session");
  save_session(path, session, model);
  const auto other = tiny_model(9);
  test::expect_error([&] { load_session(path, other); }, "session", "this model");
  {
    // The same configuration and one weight changed in its last bit.
    const auto near = tiny_model(8);
    const torch::NoGradGuard no_grad;
    auto weights = near.parameters().back().flatten();
    weights[0] = std::nextafter(weights[0].item<float>(), 1e9F);
    test::expect_error([&] { load_session(path, near); }, "session", "this model");
  }
  {
    // More tokens than there are keys of, and than memory could hold.
    const auto hybrid = tiny_model(8, true);
    Session changed(hybrid, 1);
    changed.pending = {1, 2, 3};
    test::next_id(hybrid, changed, 256);
    changed.state.tokens = std::int64_t{1} << 50;
    save_session(path, changed, hybrid);
    test::expect_bad_content([&] { load_session(path, hybrid); }, -1,
                             "is F32 [1, 2, 3, 16], expected F32 [1, 2, 1125899906842624, 16]");
  }
  save_session(path, session, model);
  const auto bytes = test::read_text(path);
  test::write_text(path, bytes.substr(0, bytes.size() / 2));
  EXPECT_THROW(load_session(path, model), IoError);
  io::write_safetensors(path, {}, {{"format", "pt"}});
  test::expect_bad_content([&] { load_session(path, model); }, -1, "not a session");
}

TEST(Session, WhatCannotBeLoadedIsNotSaved) {
  const test::TempFolder folder;
  const auto model = tiny_model(8);
  Session session(model, UINT64_MAX);  // every seed is one
  session.pending = {1, 2, 3};
  test::next_id(model, session, 256);
  const auto path = folder.file("session");
  save_session(path, session, model);
  const auto bytes = test::read_text(path);
  EXPECT_EQ(load_session(path, model).seed, UINT64_MAX);
  using Change = void (*)(Session&);
  const std::pair<Change, const char*> changes[] = {
      {[](Session& s) { s.draws = std::uint64_t{1} << 63; }, "a count of 9223372036854775808 tokens"},
      {[](Session& s) { s.state.tokens = -1; }, "a count of 18446744073709551615 tokens"},
      {[](Session& s) { s.pending = {258}; }, "token 258"},
      {[](Session& s) { s.last_ids = {-1}; }, "token -1"},
      {[](Session& s) {
         s.last_ids = {1, 2, 3, 4};
       },
       "4 last ids, at most 3"},
      {[](Session& s) { s.seen.bits().pop_back(); }, "seen has 32 bytes"},
      {[](Session& s) { s.held = "\xc3"; }, "a held text that is not UTF-8"},
      {[](Session& s) { s.state.tensors().back().second.flatten()[0] = INFINITY; }, "numbers that are not finite"},
  };
  for (const auto& [change, what] : changes) {
    Session changed = session.clone();
    change(changed);
    test::expect_bad_content([&] { save_session(path, changed, model); }, -1, what);
    EXPECT_EQ(test::read_text(path), bytes) << what;
  }
}

}  // namespace
}  // namespace efla::generate
