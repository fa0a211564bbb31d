// The engine over each of its models, with and without layers whose memory grows with the text.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "efla/io/safetensors/safetensors.h"
#include "efla/nn/models/language_model_file.h"
#include "tests/engine/recorder.h"
#include "tests/support/expect_error.h"

namespace efla::engine {
namespace {

std::shared_ptr<nn::LanguageModel> shared_model(std::uint64_t seed, bool hybrid) {
  return std::make_shared<nn::LanguageModel>(test::tiny_model(seed, hybrid));
}

std::unique_ptr<LocalEngine> engine_of(std::unique_ptr<EngineModel> made, const nn::LanguageModel& model,
                                       const EngineOptions& options = {}) {
  return std::make_unique<LocalEngine>(std::move(made), fingerprint(model), model.parameter_count(),
                                       data::load_tokenizer("bytes"), options);
}

// Returns an engine with LibTorch's operators alone, and one with the decoder of GPUs, whose functions LibTorch
// computes.
std::unique_ptr<LocalEngine> torch_engine(const std::shared_ptr<nn::LanguageModel>& model, bool decoder,
                                          const EngineOptions& options = {}) {
  std::shared_ptr<nn::GpuDecoder> made;
  if (decoder) made = std::make_shared<nn::GpuDecoder>(*model, nn::WeightType::float32, 258);
  return engine_of(make_torch_model(model, made), *model, options);
}

Request drawn(const std::string& prompt, std::int64_t max_tokens, std::uint64_t seed) {
  auto request = greedy(prompt, max_tokens);
  request.sampling.temperature = 1.0;
  request.sampling.repetition_penalty = 1.3;
  request.sampling.seed = seed;
  return request;
}

std::vector<Record> together(Engine& engine, const std::vector<Request>& requests) {
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (const auto& request : requests) {
    recorders.push_back(std::make_shared<Recorder>());
    engine.submit(request, recorders.back());
  }
  std::vector<Record> records;
  for (const auto& recorder : recorders) records.push_back(recorder->record());
  return records;
}

TEST(EngineModels, GreedyTokensOfFlashLinearAttention) {
  const std::filesystem::path goldens = std::filesystem::path(EFLA_SHARED_DATA) / "fla-goldens";
  if (!std::filesystem::exists(goldens)) GTEST_SKIP() << "no fla-goldens in " << EFLA_SHARED_DATA;
  for (const char* name : {"delta_net-a", "gdn-a", "kda-a"}) {
    const std::shared_ptr<nn::LanguageModel> model = nn::load_language_model(goldens / name);
    const io::SafetensorsFile golden(goldens / name / "golden.safetensors");
    const auto ids_in = [&](const char* tensor) {
      const auto bytes = golden.find(tensor)->bytes;
      std::vector<std::int64_t> wide(bytes.size() / sizeof(std::int64_t));
      std::memcpy(wide.data(), bytes.data(), bytes.size());
      return std::vector<std::int32_t>(wide.begin(), wide.end());
    };
    const auto expected = ids_in("greedy_ids");
    ASSERT_EQ(expected.size(), 32U);
    auto state = model->initial_state(1);
    const auto prompt = ids_in("prompt_ids");
    auto logits =
        model->prefill(torch::tensor(std::vector<std::int64_t>(prompt.begin(), prompt.end())).unsqueeze(0), state);
    std::vector<std::int32_t> ids;
    while (ids.size() < expected.size()) {
      const auto id = logits.argmax(1);
      ids.push_back(id.item<std::int32_t>());
      logits = model->step(id, state);
    }
    EXPECT_EQ(ids, expected) << name;
  }
}

class EngineModelTest : public testing::TestWithParam<bool> {};

// The texts have different lengths; half of them end before the others, and more begin while these run.
TEST_P(EngineModelTest, EachModelDrawsTheSameTokensAloneAndTogether) {
  const auto model = shared_model(1, GetParam());
  std::vector<Request> requests;
  for (int i = 0; i < 12; ++i) {
    const std::string prompt(static_cast<std::size_t>(1 + i * 37 % 150), static_cast<char>('a' + i));
    requests.push_back(i % 3 == 0 ? greedy(prompt, 4 + i * 5 % 23) : drawn(prompt, 4 + i * 5 % 23, i));
  }
  std::vector<Record> alone;
  {
    const auto engine = torch_engine(model, false);
    for (const auto& request : requests) alone.push_back(reply(*engine, request));
  }
  const auto expect_same = [&](Engine& engine, const char* what) {
    const auto all = together(engine, requests);
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i].error, "") << what;
      EXPECT_EQ(all[i].ids, alone[i].ids) << what << " " << i;
      EXPECT_EQ(all[i].text, alone[i].text) << what << " " << i;
    }
  };
  expect_same(*torch_engine(model, false), "LibTorch");
  expect_same(*torch_engine(model, true), "decoder");
  expect_same(*torch_engine(model, true, {.max_texts = 3}), "decoder, three texts at once");
  if (GetParam()) return;
  expect_same(*engine_of(make_cpu_model(*model, nn::WeightType::float32), *model), "CPU");
  expect_same(*engine_of(make_gpu_model(model, nn::WeightType::float32, 258), *model), "GPU");
}

// Bytes at random: characters of several bytes begin, break off and end at every place.
TEST_P(EngineModelTest, ATextThatIsSavedAndLoadedGoesOnAsOneUninterruptedRun) {
  const auto model = shared_model(5, GetParam());
  for (const bool decoder : {false, true}) {
    const auto engine = torch_engine(model, decoder);
    auto whole = drawn("Ein Bär", 90, 9);
    const auto expected = reply(*engine, whole);
    std::string text, bytes;
    std::int64_t tokens = 0;
    for (int part = 0; part < 30 && expected.reason == FinishReason::length; ++part) {
      auto request = drawn(part == 0 ? "Ein Bär" : "", 3, 9);
      request.stop = {"\n\n\n", "the end"};
      request.to_be_continued = part < 29;
      request.save_as = "text";
      if (part > 0) {
        engine->load("text", bytes);
        request.session = "text";
        request.sampling.seed = engine->session("text").seed;
        request.sampling.draws = engine->session("text").draws;
      }
      const auto recorder = std::make_shared<Recorder>();
      engine->submit(request, recorder);
      text += recorder->record().text;
      tokens += recorder->end().usage.completion_tokens;
      bytes = engine->save("text");
    }
    EXPECT_EQ(tokens, 90);
    EXPECT_EQ(text, expected.text);
  }
}

TEST_P(EngineModelTest, ASessionGrowsWithTheTextOnlyWhereTheStateDoes) {
  const auto engine = torch_engine(shared_model(7, GetParam()), false);
  const auto size_after = [&](std::size_t tokens) {
    reply(*engine, in_session(greedy(std::string(tokens, 'a'), 0), "", "text"));
    return engine->save("text").size();
  };
  const auto grown = size_after(500) - size_after(100);
  EXPECT_EQ(grown > 0, GetParam());
  EXPECT_EQ(engine->info().token_bytes > 0, GetParam());
}

TEST_P(EngineModelTest, SeveralRepliesToAPromptAreTheRepliesToItWithOtherSeeds) {
  const auto model = shared_model(3, GetParam());
  for (const bool decoder : {false, true}) {
    for (const std::int64_t max_texts : {1, 2, 64}) {
      const auto engine = torch_engine(model, decoder, {.max_texts = max_texts});
      std::vector<std::shared_ptr<Recorder>> recorders;
      for (int i = 0; i < 5; ++i) recorders.push_back(std::make_shared<Recorder>());
      auto request = drawn(std::string(130, 'p') + "rompt", 12, 4);
      request.logprobs = 1;
      engine->submit(request, {recorders.begin(), recorders.end()});
      for (std::size_t i = 0; i < recorders.size(); ++i) {
        auto own = request;
        own.sampling.seed += i;
        EXPECT_EQ(recorders[i]->record().ids, reply(*engine, own).ids) << i;
        EXPECT_EQ(recorders[i]->end().usage.prompt_tokens, i == 0 ? 135 : 0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(SoftmaxAttention, EngineModelTest, testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "InOneLayer" : "InNone"); });

// Mixers with two keys or several steps per token: the state of a text is continued, rolled back and forked by every
// engine that takes the mixer.
TEST(EngineModels, MixersOfSeveralKeysContinueRewindAndFork) {
  for (const char* mixer : {"gdn2", "comba", "gated-deltaproduct", "deltaproduct-neg", "rwkv7"}) {
    SCOPED_TRACE(mixer);
    auto config = test::tiny_model().config();
    config.mixer = mixer;
    const auto model = std::make_shared<nn::LanguageModel>(config, nn::Initialiser(4));
    // One engine at a time, because the threads of several wait for each other.
    std::vector<std::function<std::unique_ptr<LocalEngine>()>> engines{
        [&] { return torch_engine(model, false); }, [&] { return torch_engine(model, true); },
        [&] { return engine_of(make_gpu_model(model, nn::WeightType::float32, 258), *model); }};
    if (nn::MixerPlan(config.mixer_config()).refusal().empty()) {
      engines.emplace_back([&] { return engine_of(make_cpu_model(*model, nn::WeightType::float32), *model); });
    }
    const auto continued = [](Engine& engine, const std::string& session) {
      auto more = drawn(" and", 8, 3);
      more.session = session;
      return reply(engine, more).ids;
    };
    std::vector<std::vector<std::int32_t>> expected;  // by the first engine
    for (const auto& make : engines) {
      const auto engine = make();
      std::vector<std::vector<std::int32_t>> ids{
          reply(*engine, in_session(drawn(std::string(70, 'x'), 10, 2), "", "text")).ids};
      engine->fork("text", "copy");
      const std::string saved = engine->save("text");
      ids.push_back(continued(*engine, "text"));
      reply(*engine, rewind_of("text", 7));
      ids.push_back(continued(*engine, "text"));
      engine->load("loaded", saved);
      for (const char* same : {"copy", "loaded"}) EXPECT_EQ(continued(*engine, same), ids[1]) << same;
      EXPECT_NE(ids[2], ids[1]);
      if (expected.empty()) expected = ids;
      EXPECT_EQ(ids, expected);
    }
  }
}

TEST(EngineModels, SeveralRepliesEndWithTheirRequest) {
  const auto engine = tiny_engine();
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (int i = 0; i < 3; ++i) recorders.push_back(std::make_shared<Recorder>());
  const auto id = engine->submit(request_of("endless", 1 << 20), {recorders.begin(), recorders.end()});
  while (engine->statistics().completion_tokens == 0 && engine->statistics().first_token_seconds.total() < 3) {
  }
  engine->cancel(id);
  for (const auto& recorder : recorders) EXPECT_EQ(recorder->record().reason, FinishReason::cancelled);
  EXPECT_EQ(engine->statistics().finished[FinishReason::cancelled], 3U);

  auto stored = request_of("x", 2);
  stored.save_as = "text";
  test::expect_error([&] { engine->submit(stored, {recorders[0], recorders[1]}); }, "save_as", "one reply");
}

TEST(EngineModels, AnInterruptedReplyGoesOn) {
  const auto engine = tiny_engine();
  const auto whole = reply(*engine, drawn("abc", 20, 1));
  ASSERT_EQ(whole.reason, FinishReason::length);
  RequestId id = 0;
  std::atomic<bool> submitted = false;
  const auto first = std::make_shared<Recorder>([&](std::size_t tokens) {
    while (!submitted) {
    }
    if (tokens == 5) engine->interrupt(id);
  });
  auto request = drawn("abc", 20, 1);
  request.save_as = "text";
  request.to_be_continued = true;
  id = engine->submit(request, first);
  submitted = true;
  EXPECT_EQ(first->record().reason, FinishReason::interrupted);
  EXPECT_EQ(first->record().ids.size(), 5U);
  auto rest = drawn("", 15, 1);
  rest.session = "text";
  rest.sampling.draws = engine->session("text").draws;
  EXPECT_EQ(rest.sampling.draws, 5U);
  EXPECT_EQ(first->record().text + reply(*engine, rest).text, whole.text);
}

// Interrupts its request when the first tokens of the prompt are read.
class Impatient final : public Listener {
 public:
  explicit Impatient(Engine& engine) : engine_(engine) {}

  void prompt(std::span<const PromptToken> /*tokens*/) override { engine_.interrupt(id.get_future().get()); }
  void token(const Token& /*token*/) override {}
  void finish(const Finish& finish) override { end.set_value(finish); }

  std::promise<RequestId> id;
  std::promise<Finish> end;

 private:
  Engine& engine_;
};

TEST(EngineModels, AnInterruptedPromptGoesOn) {
  const auto engine = tiny_engine({.step_tokens = 64});
  auto request = drawn(std::string(640, 'x'), 7, 1);
  const auto whole = reply(*engine, request);
  request.echo = true;
  request.save_as = "text";
  const auto listener = std::make_shared<Impatient>(*engine);
  listener->id.set_value(engine->submit(request, listener));
  const auto end = listener->end.get_future().get();
  EXPECT_EQ(end.reason, FinishReason::interrupted);
  EXPECT_EQ(end.usage.prefilled_tokens, 64);
  EXPECT_EQ(end.usage.completion_tokens, 0);
  EXPECT_EQ(engine->session("text").tokens, 640);
  EXPECT_EQ(engine->session("text").pending, 576);
  auto rest = drawn("", 7, 1);
  rest.session = "text";
  EXPECT_EQ(reply(*engine, rest).ids, whole.ids);
}

TEST(EngineModels, TheCacheKeepsStatesWhereTheModelMayCutAPrompt) {
  const auto engine = torch_engine(shared_model(2, true), false);
  const auto request = greedy(std::string(5000, 'x'), 3);
  const auto first = reply(*engine, request);
  const auto recorder = std::make_shared<Recorder>();
  engine->submit(request, recorder);
  EXPECT_EQ(recorder->record(), first);
  EXPECT_EQ(recorder->end().usage.cached_tokens, 4096);
}

TEST(EngineModels, RefusesSessionsThatAreNotWhole) {
  const auto model = shared_model(8, true);
  const auto engine = torch_engine(model, false);
  reply(*engine, in_session(greedy("abc", 3), "", "text"));
  const auto bytes = engine->save("text");
  {
    // The same configuration and one weight changed in its last bit.
    const auto near = shared_model(8, true);
    const torch::NoGradGuard no_grad;
    auto weights = near->parameters().back().flatten();
    weights[0] = std::nextafter(weights[0].item<float>(), 1e9F);
    test::expect_error([&] { torch_engine(near, false)->load("text", bytes); }, "session", "this model");
  }
  // More tokens than there are keys of, and than memory could hold.
  auto content = io::parse_safetensors(io::as_bytes(bytes), "text");
  std::uint64_t counters[3] = {1, 3, std::uint64_t{1} << 50};
  for (auto& tensor : content.tensors) {
    if (tensor.name == "counters") tensor.bytes = {reinterpret_cast<const std::uint8_t*>(counters), sizeof(counters)};
  }
  const auto changed = io::safetensors_bytes(content.tensors, content.metadata);
  test::expect_bad_content([&] { engine->load("text", changed); }, -1, "is missing or of another type or shape");
  EXPECT_THROW(engine->load("text", bytes.substr(0, bytes.size() / 2)), IoError);
  EXPECT_EQ(engine->save("text"), bytes);
}

// A model whose texts take pages, and whose states are the numbers of their tokens.
class PagedModel final : public EngineModel {
 public:
  const nn::LanguageModelConfig& config() const override { return config_; }
  Capabilities capabilities() const override { return {}; }
  std::size_t weight_bytes() const override { return 0; }
  TextMemory text_memory() const override { return {.constant = 100, .page = 10, .page_tokens = 4}; }
  StateLayout layout(std::int64_t tokens) const override {
    return {.parts = {{"constant", {1}, 0, 1}, {"keys", {tokens}, 1, static_cast<std::size_t>(tokens)}}};
  }
  void make_slots(std::int64_t slots, std::int64_t pages) override {
    EXPECT_EQ(pages, 50);
    tokens_.assign(static_cast<std::size_t>(slots), 0);
  }
  void clear(std::int64_t slot) override { at(slot) = 0; }
  void set(std::int64_t slot, const nn::TextState& state) override { at(slot) = state.tokens; }
  void copy(std::int64_t from, std::int64_t to, std::int64_t /*tokens*/) override { at(to) = at(from); }
  void drop(std::int64_t slot) override { at(slot) = 0; }
  nn::TextState state(std::int64_t slot, std::int64_t tokens) override {
    EXPECT_EQ(tokens, at(slot));
    return {tokens, std::make_shared<std::vector<float>>(static_cast<std::size_t>(1 + tokens))};
  }
  void advance(std::span<const std::int32_t> /*ids*/, std::span<const nn::TextRun> runs,
               ThreadPool& /*pool*/) override {
    std::int64_t used = 0;
    for (const auto& run : runs) at(run.slot) += run.tokens;
    for (const auto tokens : tokens_) used += text_memory().pages(tokens);
    most_used = std::max(most_used.load(), used);
  }
  View<float, 2> logits(std::span<const std::int64_t> rows, ThreadPool& /*pool*/) override {
    logits_.assign(rows.size() * 258, 0.0F);
    return View<float, 2>::contiguous(logits_.data(), {std::ssize(rows), 258});
  }

  static inline std::atomic<std::int64_t> most_used = 0;  // pages

 private:
  std::int64_t& at(std::int64_t slot) { return tokens_[static_cast<std::size_t>(slot)]; }

  nn::LanguageModelConfig config_ = test::tiny_model().config();
  std::vector<std::int64_t> tokens_;
  std::vector<float> logits_;
};

TEST(EnginePages, TextsBeginWhenThereArePagesForTheirEnd) {
  PagedModel::most_used = 0;
  const EngineOptions options{.state_memory = 1000, .cache_memory = 0};
  LocalEngine engine(std::make_unique<PagedModel>(), "0", 1, data::load_tokenizer("bytes"), options);
  EXPECT_EQ(engine.statistics().slots, 5);  // half of the memory; the other half has 50 pages
  std::vector<Request> requests;
  for (int i = 0; i < 20; ++i)
    requests.push_back(request_of(std::string(static_cast<std::size_t>(1 + 7 * i), 'a'), 30));
  for (const auto& record : together(engine, requests)) EXPECT_EQ(record.ids.size(), 30U);
  EXPECT_GT(PagedModel::most_used, 40);
  EXPECT_LE(PagedModel::most_used, 50);
  test::expect_error([&] { reply(engine, request_of(std::string(171, 'a'), 30)); }, "state_memory",
                     "room for 201 tokens");
  EXPECT_EQ(reply(engine, request_of(std::string(170, 'a'), 30)).ids.size(), 30U);

  reply(engine, in_session(request_of(std::string(100, 'a'), 30), "", "text"));
  const auto bytes = engine.save("text");
  engine.load("again", bytes);
  EXPECT_EQ(engine.save("again"), bytes);
  EXPECT_EQ(reply(engine, in_session(request_of("b", 9), "again", "again")).ids.size(), 9U);
  EXPECT_EQ(engine.session("again").tokens, 140);
}

}  // namespace
}  // namespace efla::engine
