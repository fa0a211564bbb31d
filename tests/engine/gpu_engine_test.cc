// The engine over GpuDecoder. Without a GPU LibTorch computes the same functions on the CPU.
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/recorder.h"
#include "tests/support/expect_error.h"

namespace efla::engine {
namespace {

class GpuEngine : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
    options.on_gpu = GetParam();
  }

  EngineOptions options;
};

// Texts of other lengths, which begin and end while others are decoded, and go on as sessions.
TEST_P(GpuEngine, RepliesAsTheEngineOnTheCpu) {
  const auto on_cpu = tiny_engine(), on_gpu = gpu_engine(options);
  std::vector<Request> first, second;
  for (int i = 0; i < 11; ++i) {
    first.push_back(
        greedy(std::string(static_cast<std::size_t>(1 + i * 37 % 200), static_cast<char>('a' + i)), 3 + i * 5 % 23));
    first.back().save_as = std::to_string(i);
    second.push_back(greedy(std::string(static_cast<std::size_t>(1 + i * 53 % 90), '?'), 2 + i * 7 % 19));
    second.back().session = first.back().save_as;
  }
  EXPECT_EQ(replies(*on_gpu, first), replies(*on_cpu, first));
  EXPECT_EQ(replies(*on_gpu, second), replies(*on_cpu, second));
  const auto again = replies(*on_gpu, second);  // a session stays as it is
  EXPECT_EQ(again, replies(*on_cpu, second));
}

TEST_P(GpuEngine, KeepsSessionsThatTheEngineOnTheCpuContinues) {
  const auto on_cpu = tiny_engine(), on_gpu = gpu_engine(options);
  auto begin = greedy(std::string(100, 'x'), 20);
  begin.save_as = "text";
  EXPECT_EQ(reply(*on_gpu, begin).ids, reply(*on_cpu, begin).ids);
  on_cpu->load("moved", on_gpu->save("text"));
  on_gpu->fork("text", "copy");
  const auto continued = [](Engine& engine, const std::string& session) {
    auto more = greedy(" and", 20);
    more.session = session;
    return reply(engine, more).ids;
  };
  const auto expected = continued(*on_cpu, "text");
  EXPECT_EQ(continued(*on_cpu, "moved"), expected);
  EXPECT_EQ(continued(*on_gpu, "text"), expected);
  for (auto* engine : {on_cpu.get(), on_gpu.get()}) rewind(*engine, "text", 7);
  EXPECT_EQ(continued(*on_gpu, "text"), continued(*on_cpu, "text"));
  EXPECT_EQ(continued(*on_gpu, "copy"), expected);
}

TEST_P(GpuEngine, EndsTurnsAndUsesThePrefixCacheAsTheEngineOnTheCpu) {
  const auto on_cpu = tiny_engine(), on_gpu = gpu_engine(options);
  const auto text = reply(*on_cpu, greedy("abc", 20)).text;
  ASSERT_GE(text.size(), 12U);
  auto turn = greedy("abc", 20);
  turn.save_as = "chat";
  turn.stop = {text.substr(8, 3)};
  turn.end_turn = "\n";
  EXPECT_EQ(reply(*on_gpu, turn), reply(*on_cpu, turn));
  for (int i = 0; i < 2; ++i) {  // the first ends by its length, and its turn is prefilled after it
    auto next = greedy("next", 12);
    next.session = next.save_as = "chat";
    next.end_turn = "\n";
    EXPECT_EQ(reply(*on_gpu, next).ids, reply(*on_cpu, next).ids);
  }

  auto prefix = greedy(std::string(200, 'p') + "one", 10);
  prefix.cache_after = {200};
  replies(*on_gpu, {prefix});
  prefix.prompt.back() = 'x';
  const auto recorder = std::make_shared<Recorder>();
  on_gpu->submit(prefix, recorder);
  EXPECT_EQ(recorder->record().ids, reply(*on_cpu, prefix).ids);
  EXPECT_EQ(recorder->end().usage.cached_tokens, 192);
}

// Some are drawn together on the GPU; others need their logits.
TEST_P(GpuEngine, DrawsAsTheEngineOnTheCpuWithAnyOptions) {
  const auto on_cpu = tiny_engine(), on_gpu = gpu_engine(options);
  std::vector<Request> requests;
  for (int i = 0; i < 14; ++i) {
    requests.push_back(request_of(std::string(static_cast<std::size_t>(3 + i), static_cast<char>('a' + i)), 8 + i));
    auto& request = requests.back();
    auto& sampling = request.sampling;
    sampling.seed = static_cast<std::uint64_t>(i);
    sampling.temperature = i % 7 == 3 ? 0.0 : 0.8;
    if (i % 7 == 1) sampling.top_p = 0.9;
    if (i % 7 == 2) sampling.repetition_penalty = 1.3;
    if (i % 7 == 4) sampling.presence_penalty = 0.5;
    if (i % 7 != 5) sampling.logit_bias.clear();
    if (i % 7 == 6) request.logprobs = 2;
  }
  EXPECT_EQ(replies(*on_gpu, requests), replies(*on_cpu, requests));
}

// While one text is decoded, others begin, end and are cancelled.
TEST_P(GpuEngine, BeginsToDecodeTokensBeforeItHasThem) {
  const auto on_cpu = tiny_engine(), on_gpu = gpu_engine(options);
  const auto drawn = [](const std::string& prompt, std::int64_t max_tokens, std::uint64_t seed) {
    auto request = request_of(prompt, max_tokens);
    request.sampling.logit_bias.clear();  // which the GPU does not take
    request.sampling.seed = seed;
    return request;
  };
  auto session = drawn("abc", 4, 1);
  session.save_as = "text";
  EXPECT_EQ(reply(*on_gpu, session).ids, reply(*on_cpu, session).ids);
  auto at_once = drawn("", 7, 2);  // without a prompt to be prefilled
  at_once.session = "text";
  const std::vector<Request> others = {at_once, drawn("d", 1, 3), drawn("ef", 9, 4), at_once, drawn("g", 12, 5)};
  const auto endless = drawn("h", 1000, 6);

  std::vector<std::shared_ptr<Recorder>> recorders;
  const auto cancelled = std::make_shared<Recorder>();
  RequestId to_cancel = 0;
  const auto longest = std::make_shared<Recorder>([&](std::size_t tokens) {
    if (tokens == 20) to_cancel = on_gpu->submit(endless, cancelled);
    if (tokens == 28) on_gpu->cancel(to_cancel);
    if (tokens % 5 != 4 || recorders.size() == others.size()) return;
    recorders.push_back(std::make_shared<Recorder>());
    on_gpu->submit(others[recorders.size() - 1], recorders.back());
  });
  const auto longest_request = drawn("The state", 45, 7);
  on_gpu->submit(longest_request, longest);
  EXPECT_EQ(longest->record(), reply(*on_cpu, longest_request));
  ASSERT_EQ(recorders.size(), others.size());
  for (std::size_t i = 0; i < others.size(); ++i) EXPECT_EQ(recorders[i]->record(), reply(*on_cpu, others[i])) << i;
  auto begun = endless;
  begun.max_tokens = std::ssize(cancelled->record().ids);
  EXPECT_GT(begun.max_tokens, 4);
  EXPECT_EQ(cancelled->record().ids, reply(*on_cpu, begun).ids);
}

TEST_P(GpuEngine, TakesTheStateMemoryTwice) {
  const auto bytes = tiny_engine()->info().session_bytes;
  options.state_memory = 7 * bytes;
  const auto engine = gpu_engine(options);
  EXPECT_EQ(engine->statistics().slots, 3);
  EXPECT_EQ(engine->info().session_bytes, bytes);
  std::vector<Request> many;
  for (int i = 0; i < 9; ++i) many.push_back(greedy(std::string(static_cast<std::size_t>(i + 1), 'm'), 6));
  EXPECT_EQ(replies(*engine, many), replies(*tiny_engine(), many));
}

// Which InferenceModel refuses.
TEST(GpuModel, TakesMixersWithoutShortConvolution) {
  auto config = test::tiny_model().config();
  config.use_short_conv = false;
  const auto model = std::make_shared<nn::LanguageModel>(config, nn::Initialiser(1));
  const auto engine_of = [&](std::unique_ptr<EngineModel> made) {
    return std::make_unique<LocalEngine>(std::move(made), fingerprint(*model), model->parameter_count(),
                                         data::load_tokenizer("bytes"), EngineOptions());
  };
  const auto engine = engine_of(make_gpu_model(model, nn::WeightType::float32, 258));
  const auto request = in_session(greedy("The state", 20), "", "text");
  const auto record = reply(*engine, request);
  EXPECT_GE(record.ids.size(), 8U);
  EXPECT_EQ(record, reply(*engine_of(make_torch_model(model)), request));
  engine->load("again", engine->save("text"));
}

TEST(GpuModel, RefusesModelsWhoseStatesGrow) {
  const auto hybrid = std::make_shared<nn::LanguageModel>(test::tiny_model(1, /*hybrid=*/true));
  test::expect_error([&] { make_gpu_model(hybrid, nn::WeightType::float32, 258); }, "model", "softmax attention");
}

INSTANTIATE_TEST_SUITE_P(Devices, GpuEngine, testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "OnAGpu" : "OnTheCpu"); });

}  // namespace
}  // namespace efla::engine
