// The engine over models of families as a GPU computes them. Without a GPU LibTorch and references compute the same
// functions on the CPU.
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "efla/nn/families/gpu_family_model.h"
#include "tests/engine/family_model.h"
#include "tests/engine/recorder.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::engine {
namespace {

// The parameters: whether on a GPU, and whether the family is olmo_hybrid.
class GpuFamilyEngine : public testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  GpuFamilyEngine() : folder(std::get<1>(GetParam())) {}
  void SetUp() override {
    if (on_gpu() && !torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  }
  bool on_gpu() const { return std::get<0>(GetParam()); }
  std::unique_ptr<Engine> engine(const EngineOptions& options = {}) const {
    const std::shared_ptr<const data::Tokenizer> tokenizer = data::load_tokenizer("bytes");
    const auto model =
        std::make_shared<nn::GpuFamilyModel>(folder.path(), nn::WeightType::float32, tokenizer->vocab_size(),
                                             on_gpu() ? torch::Device(torch::kCUDA) : torch::Device(torch::kCPU));
    return std::make_unique<LocalEngine>(make_family_model(model), model->fingerprint(), model->parameters(), tokenizer,
                                         options);
  }

  const FamilyFolder folder;
};

// Texts of other lengths, which begin and end while others are decoded, and go on as sessions.
TEST_P(GpuFamilyEngine, RepliesAsTheEngineOnTheCpu) {
  const auto on_cpu = folder.engine(), gpu = engine();
  std::vector<Request> first, second;
  for (int i = 0; i < 11; ++i) {
    first.push_back(
        greedy(std::string(static_cast<std::size_t>(1 + i * 37 % 200), static_cast<char>('a' + i)), 3 + i * 5 % 23));
    first.back().save_as = std::to_string(i);
    second.push_back(greedy(std::string(static_cast<std::size_t>(1 + i * 53 % 90), '?'), 2 + i * 7 % 19));
    second.back().session = first.back().save_as;
  }
  EXPECT_EQ(replies(*gpu, first), replies(*on_cpu, first));
  EXPECT_EQ(replies(*gpu, second), replies(*on_cpu, second));
  EXPECT_EQ(replies(*gpu, second), replies(*on_cpu, second));  // a session stays as it is
}

TEST_P(GpuFamilyEngine, SessionsMoveBetweenAGpuAndTheCpu) {
  const auto on_cpu = folder.engine(), gpu = engine();
  auto begin = greedy(std::string(100, 'x'), 40);
  begin.save_as = "text";
  EXPECT_EQ(reply(*gpu, begin).ids, reply(*on_cpu, begin).ids);
  on_cpu->load("moved", gpu->save("text"));
  gpu->load("moved", on_cpu->save("text"));
  gpu->fork("text", "copy");
  const auto continued = [](Engine& engine, const std::string& session) {
    auto more = greedy(" and", 70);
    more.session = session;
    return reply(engine, more).ids;
  };
  const auto expected = continued(*on_cpu, "text");
  EXPECT_EQ(continued(*on_cpu, "moved"), expected);
  for (const char* session : {"text", "moved", "copy"}) EXPECT_EQ(continued(*gpu, session), expected) << session;
  EXPECT_EQ(gpu->info().session_bytes, on_cpu->info().session_bytes);
  EXPECT_EQ(gpu->info().token_bytes, on_cpu->info().token_bytes);
}

// The state memory has pages for few texts, and the prefix cache shares pages with them.
TEST_P(GpuFamilyEngine, SharesPagesWithThePrefixCache) {
  const auto info = folder.engine()->info();
  const auto gpu = engine({.state_memory = 3 * (info.session_bytes + 6 * 64 * info.token_bytes)});
  const auto on_cpu = folder.engine();
  std::vector<Request> requests;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(greedy(std::string(200, 'p') + static_cast<char>('a' + i), 20));
    requests.back().cache_after = {200};
  }
  for (int round = 0; round < 2; ++round) EXPECT_EQ(replies(*gpu, requests), replies(*on_cpu, requests));
  EXPECT_GT(gpu->statistics().cache_hits, 0U);
}

TEST_P(GpuFamilyEngine, RefusesMoreStateMemoryThanItsDeviceHas) {
  test::expect_error([&] { engine({.state_memory = std::size_t{1} << 50}); }, "state_memory", "beside the weights");
}

// Sessions that continue one text share its pages, also after these have moved to files.
TEST_P(GpuFamilyEngine, SwapsASharedPageOnce) {
  constexpr std::size_t kSessions = 5, kTokens = 640, kRecord = 4096;
  const test::TempFolder swap;
  const auto info = folder.engine()->info();
  const std::size_t page = 64 * info.token_bytes, session = info.session_bytes + page + kRecord;
  const auto gpu = engine({.session_memory = 2 * session, .swap = swap.path()});
  auto first = greedy(std::string(kTokens, 'a'), 1);
  first.save_as = "0";
  reply(*gpu, first);
  for (std::size_t i = 1; i < kSessions; ++i) {
    auto more = greedy("bcd", 2);
    more.session = std::to_string(i - 1);
    more.save_as = std::to_string(i);
    reply(*gpu, more);
  }
  const auto now = gpu->statistics();
  EXPECT_GT(now.swapped_bytes, kTokens * info.token_bytes / 2);
  EXPECT_LT(now.session_bytes + now.swapped_bytes, kSessions * session + kTokens * info.token_bytes);
}

INSTANTIATE_TEST_SUITE_P(Devices, GpuFamilyEngine, testing::Combine(testing::Bool(), testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "OnAGpu_" : "OnTheCpu_") +
                                  (std::get<1>(info.param) ? "olmo_hybrid" : "qwen3_5_text");
                         });

}  // namespace
}  // namespace efla::engine
