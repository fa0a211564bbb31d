// Generation: the same tokens however a prompt is prefilled, streaming, stop strings, ends, and
// flash-linear-attention's greedy tokens.
#include "efla/generate/generator.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "efla/base/utf8.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/nn/inference/gpu_decoder.h"
#include "efla/nn/models/language_model_file.h"
#include "tests/generate/tiny_model.h"
#include "tests/support/compare.h"
#include "tests/support/expect_error.h"
#include "tests/support/special_tokens.h"
#include "tests/support/temp_folder.h"

namespace efla::generate {
namespace {

using test::expect_error;
using test::tiny_model;

class GeneratorTest : public testing::Test {
 protected:
  Reply reply(const std::string& prompt, const ReplyOptions& options, std::uint64_t seed = 0) const {
    Session session(model, seed);
    return generator.reply(session, generator.encode(session, prompt, false), options);
  }

  const nn::LanguageModel model = tiny_model();
  const std::unique_ptr<data::Tokenizer> tokenizer = data::load_tokenizer("bytes");
  const Generator generator{model, *tokenizer};
  const SamplingOptions warm{.temperature = 1.0, .top_k = 40, .top_p = 0.95, .repetition_penalty = 1.2};
};

std::vector<std::int64_t> ids_of(const io::SafetensorsFile& file, const char* name) {
  const auto* tensor = file.find(name);
  std::vector<std::int64_t> ids(tensor->bytes.size() / sizeof(std::int64_t));
  std::memcpy(ids.data(), tensor->bytes.data(), tensor->bytes.size());
  return ids;
}

TEST(GeneratorGoldens, GreedyTokensOfFlashLinearAttention) {
  const std::filesystem::path goldens = std::filesystem::path(EFLA_SHARED_DATA) / "fla-goldens";
  if (!std::filesystem::exists(goldens)) GTEST_SKIP() << "no fla-goldens in " << EFLA_SHARED_DATA;
  for (const char* name : {"delta_net-a", "gdn-a", "kda-a"}) {
    const auto model = nn::load_language_model(goldens / name);
    const io::SafetensorsFile golden(goldens / name / "golden.safetensors");
    const auto expected = ids_of(golden, "greedy_ids");
    ASSERT_EQ(expected.size(), 32U);
    Session session(*model, 0);
    session.pending = ids_of(golden, "prompt_ids");
    std::vector<std::int64_t> ids;
    while (ids.size() < expected.size()) ids.push_back(test::next_id(*model, session, model->config().vocab_size));
    EXPECT_EQ(ids, expected) << name;
  }
}

TEST(Generator, SameTokensFromPrefillAsTokenByToken) {
  for (const bool hybrid : {false, true}) {
    const auto model = tiny_model(2, hybrid);
    Random random(4);
    std::vector<std::int64_t> prompt(150);
    for (auto& id : prompt) id = random.below(258);
    const auto continued = [&](std::size_t piece) {
      Session session(model, 3);
      std::vector<std::int64_t> ids;
      for (std::size_t at = 0; at < prompt.size(); at += piece) {
        const auto end = std::min(at + piece, prompt.size());
        session.pending.assign(prompt.begin() + at, prompt.begin() + end);
        ids = {test::next_id(model, session, 258)};
      }
      while (ids.size() < 40) ids.push_back(test::next_id(model, session, 258));
      return ids;
    };
    const auto whole = continued(prompt.size());
    EXPECT_EQ(continued(1), whole);
    EXPECT_EQ(continued(7), whole);
    EXPECT_EQ(continued(64), whole);
  }
}

double relative_distance(const torch::Tensor& a, const torch::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

TEST(Generator, TheDecoderOfGpusDrawsTheSameTokens) {
  const auto tokenizer = data::load_tokenizer("bytes");
  for (const bool hybrid : {false, true}) {
    const auto model = tiny_model(6, hybrid);
    const nn::GpuDecoder decoder(model, nn::WeightType::float32, 258);
    auto state = model.initial_state(2), same = model.initial_state(2);
    const auto ids = torch::tensor({3, 250}, torch::kLong);
    for (int i = 0; i < 3; ++i) {
      const auto output = decoder.step(ids, state);
      const auto logits = model.step(ids, same);
      EXPECT_LE(relative_distance(output.logits, logits), test::tolerance_of("float32").cap);
      const auto likeliest = output.likeliest.select(1, 0).to(torch::kLong);
      EXPECT_TRUE(likeliest.equal(output.logits.argmax(1))) << likeliest;
    }
    EXPECT_EQ(state.tokens, 3);
    // Another decoder does not take what this one keeps beside the state.
    auto other_model = tiny_model(7, hybrid);
    const nn::GpuDecoder other_decoder(other_model, nn::WeightType::float32, 258);
    EXPECT_LE(relative_distance(other_decoder.step(ids, state).logits, other_model.step(ids, same)),
              test::tolerance_of("float32").cap);
    expect_error([&] { nn::GpuDecoder(model, nn::WeightType::int8, 258); }, "weights", "int8 on a GPU");

    const Generator alone(model, *tokenizer), decoding(model, *tokenizer, nullptr, &decoder);
    EXPECT_TRUE(decoding.continues_together());
    EXPECT_FALSE(alone.continues_together());
    const ReplyOptions options{.max_tokens = 25};
    Session one(model, 1), other(model, 1);
    const auto prompt = alone.encode(one, "The state", false);
    const auto reply = alone.reply(other, prompt, options);
    EXPECT_EQ(decoding.reply(one, prompt, options).ids, reply.ids);
    // Steps ahead of the ids that are read, with a text that ends before its most tokens.
    const auto middle = utf8_prefix(reply.text.substr(0, reply.text.size() / 2));
    for (const std::string& stop :
         {std::string("never"), reply.text.substr(middle, utf8_prefix(reply.text.substr(middle, 12)))}) {
      Session ahead(model, 1), exact(model, 1);
      ReplyOptions until{.max_tokens = 25, .stop = {stop}};
      const auto expected = decoding.reply(exact, prompt, until);
      until.ends_session = true;
      EXPECT_EQ(decoding.reply(ahead, prompt, until).ids, expected.ids);
      EXPECT_EQ(exact.state.tokens, static_cast<std::int64_t>(prompt.size() + expected.ids.size()) - 1);
    }
  }
}

class HybridGeneratorTest : public testing::TestWithParam<bool> {};

// The texts have different lengths, and half of them end before the others.
TEST_P(HybridGeneratorTest, ContinuesTextsTogetherAsOneByOne) {
  const auto model = tiny_model(1, GetParam());
  const auto tokenizer = data::load_tokenizer("bytes");
  const nn::GpuDecoder decoder(model, nn::WeightType::float32, tokenizer->vocab_size());
  const Generator generator(model, *tokenizer), together(model, *tokenizer, nullptr, &decoder);
  const SamplingOptions warm{.temperature = 1.0, .top_k = 40, .top_p = 0.95, .repetition_penalty = 1.2};
  const std::vector<std::string> texts{"a", "The rule", "rules of the state", "", "b", "!"};
  for (const auto& sampling : {SamplingOptions{.temperature = 0.0}, warm}) {
    Session session(model, 1);
    const auto all =
        generator
            .reply(session, generator.encode(session, texts[1], /*bos=*/true), {.sampling = sampling, .max_tokens = 30})
            .text;
    const auto middle = utf8_prefix(all.substr(0, all.size() / 2));
    const std::string stop = all.substr(middle, utf8_prefix(all.substr(middle, 12)));
    const ReplyOptions options{.sampling = sampling, .max_tokens = 30, .stop = {stop}};
    std::vector<Session> sessions;
    std::vector<std::vector<std::int32_t>> prompts;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      sessions.emplace_back(model, i);
      prompts.push_back(generator.encode(sessions.back(), texts[i], /*bos=*/true));
    }
    std::vector<Reply> replies;
    together.replies(sessions, prompts, options, [&](std::size_t i, const Reply& reply) {
      EXPECT_EQ(i, replies.size());
      replies.push_back(reply);
    });
    ASSERT_EQ(replies.size(), texts.size());
    int stopped = 0;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      Session own(model, i);
      const auto alone = generator.reply(own, prompts[i], options);
      EXPECT_EQ(replies[i].ids, alone.ids) << texts[i];
      EXPECT_EQ(replies[i].text, alone.text);
      EXPECT_EQ(replies[i].end, alone.end);
      EXPECT_EQ(replies[i].prefill_tokens, alone.prefill_tokens);
      EXPECT_EQ(replies[i].decode_tokens, alone.decode_tokens);
      stopped += alone.end == ReplyEnd::stop_string;
    }
    EXPECT_GT(stopped, 0);
    EXPECT_LT(stopped, 6);
  }
}

INSTANTIATE_TEST_SUITE_P(SoftmaxAttention, HybridGeneratorTest, testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "InOneLayer" : "InNone"); });

TEST_F(GeneratorTest, PrefillsTogetherWhatFits) {
  const nn::GpuDecoder decoder(model, nn::WeightType::float32, tokenizer->vocab_size());
  const Generator together(model, *tokenizer, nullptr, &decoder);
  const ReplyOptions options{.max_tokens = 6};
  std::vector<Session> sessions, alone;
  std::vector<std::vector<std::int32_t>> prompts;
  Random random(5);
  for (const std::size_t length : {5'000, 5'000, 3, 2, 9'000, 7, 70}) {
    for (auto* all : {&sessions, &alone}) {
      all->emplace_back(model, 1);
      if (length == 2) together.reply(all->back(), std::vector<std::int32_t>{1, 2, 3}, {.max_tokens = 1});  // goes on
    }
    auto& prompt = prompts.emplace_back(length);
    for (auto& id : prompt) id = static_cast<std::int32_t>(random.below(256));
  }
  std::vector<std::vector<std::int32_t>> ids;
  together.replies(sessions, prompts, options, [&](std::size_t, const Reply& reply) { ids.push_back(reply.ids); });
  ASSERT_EQ(ids.size(), prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(ids[i], together.reply(alone[i], prompts[i], options).ids) << i;
  }
}

// The prompts of a model with softmax attention are prefilled one after the other.
TEST_F(GeneratorTest, AnErrorOfOneTextLeavesTheOthersReplies) {
  const auto hybrid = tiny_model(1, /*hybrid=*/true);
  const nn::GpuDecoder decoder(hybrid, nn::WeightType::float32, tokenizer->vocab_size());
  const Generator together(hybrid, *tokenizer, nullptr, &decoder);
  std::vector<Session> sessions;
  std::vector<std::vector<std::int32_t>> prompts;
  for (const char* text : {"a", "b", "c"}) {
    sessions.emplace_back(hybrid, 1);
    prompts.push_back(together.encode(sessions.back(), text, false));
  }
  std::vector<std::size_t> complete;
  const auto fail_at_the_third = [&] {
    if (complete.size() == 2) throw std::runtime_error("no memory");
    return false;
  };
  const ReplyOptions options{.max_tokens = 1, .interrupted = fail_at_the_third};
  EXPECT_THROW(together.replies(sessions, prompts, options,
                                [&](std::size_t i, const Reply& reply) {
                                  EXPECT_EQ(reply.ids.size(), 1U);
                                  complete.push_back(i);
                                }),
               std::runtime_error);
  EXPECT_EQ(complete, (std::vector<std::size_t>{0, 1}));
}

TEST_F(GeneratorTest, StreamsTheTextAsUtf8) {
  std::string streamed;
  const ReplyOptions options{.sampling = warm, .max_tokens = 200, .on_text = [&](std::string_view piece) {
                               EXPECT_FALSE(piece.empty());
                               EXPECT_EQ(utf8_prefix(piece), piece.size());
                               streamed += piece;
                             }};
  const auto whole = reply("naïve", options);
  EXPECT_GT(whole.ids.size(), 20U);
  EXPECT_EQ(streamed, whole.text);
  EXPECT_EQ(whole.text, tokenizer->decode(whole.ids));
  EXPECT_EQ(whole.prefill_tokens, 6);
  EXPECT_EQ(whole.decode_tokens, whole.ids.size() - 1);
  EXPECT_EQ(reply("naïve", options).ids, whole.ids);
  EXPECT_NE(reply("naïve", options, 1).ids, whole.ids);
}

TEST_F(GeneratorTest, EndsAtStopStringsAndAtTheEndOfText) {
  const auto whole = reply("abc", {.sampling = warm, .max_tokens = 60}).text;
  const auto middle = utf8_prefix(whole.substr(0, 20));
  const auto stop = whole.substr(middle, utf8_prefix(whole.substr(middle, 8)));
  std::string streamed;
  const auto stopped = reply("abc", {.sampling = warm,
                                     .max_tokens = 60,
                                     .stop = {"never to be seen", stop},
                                     .on_text = [&](std::string_view piece) { streamed += piece; }});
  EXPECT_EQ(stopped.end, ReplyEnd::stop_string);
  EXPECT_EQ(stopped.text, whole.substr(0, whole.find(stop)));
  EXPECT_EQ(streamed, stopped.text);

  // At least one of 40 texts ends by itself.
  int ended = 0;
  for (std::uint64_t seed = 0; seed < 40 && ended == 0; ++seed) {
    const auto some = reply("abc", {.sampling = {.temperature = 3.0}, .max_tokens = 60}, seed);
    if (some.end != ReplyEnd::end_of_text) continue;
    ++ended;
    EXPECT_EQ(some.ids.back(), tokenizer->eos());
    EXPECT_EQ(some.text, tokenizer->decode(some.ids));
  }
  EXPECT_EQ(ended, 1);
}

TEST_F(GeneratorTest, APromptWithoutAReplyCanBeGoneOnFrom) {
  const ReplyOptions options{.sampling = warm, .max_tokens = 30};
  Session session(model, 0);
  const auto none = generator.reply(session, generator.encode(session, "some text", true), {.max_tokens = 0});
  EXPECT_EQ(none.ids.size(), 0U);
  EXPECT_EQ(session.state.tokens, 9);  // the beginning of a text and all but the last
  EXPECT_EQ(session.pending.size(), 1U);
  const auto later = generator.reply(session, {}, options);
  Session other(model, 0);
  EXPECT_EQ(generator.reply(other, generator.encode(other, "some text", true), options).ids, later.ids);
}

TEST_F(GeneratorTest, DraftsChangeNoBit) {
  const test::TempFolder folder;
  const auto repeating = test::repeating_model();
  for (const auto weights : {nn::WeightType::float32, nn::WeightType::int8}) {
    nn::InferenceModel inference(repeating, weights);
    const Generator drafting(repeating, *tokenizer, &inference);
    Reply all;         // of the replies with drafts
    std::string stop;  // the second time a part of the first text
    for (int run = 0; run < 2; ++run) {
      for (const double temperature : {0.0, 0.4}) {
        Reply replies[2];
        std::string files[2];
        for (const int draft : {0, 7}) {
          ReplyOptions options{.sampling = {.temperature = temperature}, .max_tokens = 100, .draft_tokens = draft};
          options.to_be_continued = true;
          if (!stop.empty()) options.stop = {stop};
          Session session(repeating, 3);
          auto& reply = replies[draft / 7];
          reply = drafting.reply(session, drafting.encode(session, "abc", false), options);
          save_session(folder.file("session"), session, repeating);
          files[draft / 7] = test::read_text(folder / "session");
          EXPECT_EQ(reply.decode_tokens, std::ssize(reply.ids) - 1);
        }
        EXPECT_EQ(replies[0].ids, replies[1].ids);
        EXPECT_EQ(replies[0].text, replies[1].text);
        EXPECT_EQ(replies[0].end, replies[1].end);
        EXPECT_EQ(files[0], files[1]);
        EXPECT_EQ(replies[0].drafted_tokens, 0);
        if (temperature == 0.0) {
          EXPECT_EQ(replies[1].end, run == 0 ? ReplyEnd::max_tokens : ReplyEnd::stop_string);
        }
        all.drafted_tokens += replies[1].drafted_tokens;
        all.accepted_tokens += replies[1].accepted_tokens;
        if (stop.empty()) stop = replies[0].text.substr(0, utf8_prefix(replies[0].text.substr(0, 40)));
      }
    }
    EXPECT_GT(all.accepted_tokens, 60);
    EXPECT_GT(all.drafted_tokens, all.accepted_tokens);
  }
  expect_error([&] { reply("abc", {.draft_tokens = 8}); }, "draft_tokens", "0 to 7");
}

TEST_F(GeneratorTest, StopsWhenInterrupted) {
  int asked = 0;
  Session session(model, 0);
  const auto prompt = generator.encode(session, "abc", false);
  ReplyOptions options{.sampling = warm, .max_tokens = 20, .to_be_continued = true};
  options.interrupted = [&] { return ++asked > 5; };
  const auto first = generator.reply(session, prompt, options);
  EXPECT_EQ(first.end, ReplyEnd::interrupted);
  EXPECT_EQ(first.ids.size(), 5U);
  options.interrupted = {};
  options.max_tokens = 15;
  const auto second = generator.reply(session, {}, options);
  options.max_tokens = 20;
  options.to_be_continued = false;
  const auto whole = reply("abc", options);
  EXPECT_EQ(second.ids, std::vector<std::int32_t>(whole.ids.begin() + 5, whole.ids.end()));
}

TEST_F(GeneratorTest, EndsAtEachTokenThatEndsAText) {
  const auto whole = reply("The rule", {.max_tokens = 30}).ids;
  ASSERT_EQ(whole.size(), 30U);
  const auto last = std::find(whole.begin(), whole.end(), whole[11]) - whole.begin();
  auto config = model.config();
  for (const bool several : {true, false}) {
    config.eos_token_id = {whole[11]};
    if (several) config.eos_token_id.push_back(3);
    const nn::LanguageModel ending(config, nn::Initialiser(1));
    const Generator own(ending, *tokenizer);
    Session session(ending, 0);
    const auto ended = own.reply(session, own.encode(session, "The rule", false), {.max_tokens = 30});
    EXPECT_EQ(ended.end, ReplyEnd::end_of_text);
    EXPECT_EQ(std::ssize(ended.ids), last + 1);
  }
}

TEST_F(GeneratorTest, EndsAtSpecialTokensOfStopStrings) {
  const auto whole = reply("The rule", {.max_tokens = 30}).ids;
  ASSERT_EQ(whole.size(), 30U);
  const auto special = whole[11];
  const test::BytesWithSpecial with_special(special, "<|end|>");
  nn::InferenceModel inference(model, nn::WeightType::float32);
  const auto first = std::find(whole.begin(), whole.end(), special) - whole.begin();
  for (nn::InferenceModel* computed : {static_cast<nn::InferenceModel*>(nullptr), &inference}) {
    const Generator own(model, with_special, computed);
    const auto ended = [&](const std::vector<std::string>& stop) {
      Session session(model, 0);
      return own.reply(session, own.encode(session, "The rule", false), {.max_tokens = 30, .stop = stop});
    };
    const auto stopped = ended({"<|end|>"});
    EXPECT_EQ(stopped.end, ReplyEnd::stop_string);
    EXPECT_EQ(std::ssize(stopped.ids), first + 1);
    EXPECT_EQ(stopped.text, tokenizer->decode(std::span(whole).first(static_cast<std::size_t>(first))));
    EXPECT_EQ(ended({"end", "<"}).end, ReplyEnd::max_tokens);
  }
}

TEST_F(GeneratorTest, Mistakes) {
  Session session(model, 0);
  expect_error([&] { generator.encode(session, "a\xff", false); }, "prompt", "UTF-8");
  expect_error([&] { generator.reply(session, {}, {.max_tokens = 1}); }, "prompt", "");
  expect_error([&] { reply("a", {.max_tokens = -1}); }, "max_tokens", "-1");
  expect_error([&] { reply("a", {.max_tokens = 1, .stop = {""}}); }, "stop", "empty");
  expect_error([&] { reply("a", {.max_tokens = 1, .stop = {"\xc3"}}); }, "stop", "UTF-8");
  nn::LanguageModelConfig small = model.config();
  small.vocab_size = 257;
  small.eos_token_id = {0};
  const nn::LanguageModel other(small, nn::Initialiser(1));
  expect_error([&] { Generator(other, *tokenizer); }, "tokenizer", "258");
}

}  // namespace
}  // namespace efla::generate
