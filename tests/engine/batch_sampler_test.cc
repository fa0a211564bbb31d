// Draws of several rows at once against draws of one row.
#include "efla/engine/batch_sampler.h"

#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <cmath>
#include <vector>

#include "efla/base/random.h"

namespace efla::engine {
namespace {

// On a GPU where there is one, otherwise on the CPU.
TEST(BatchSampler, DrawsWhatTheSamplerDraws) {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  constexpr std::int64_t kRows = 5, kVocab = 250;
  Random random(3);
  std::vector<SeenIds> seen(kRows, SeenIds(258));
  std::uint64_t draws = 0;
  for (const auto& options :
       std::vector<SamplingOptions>{{},
                                    {.temperature = 1.0},
                                    {.temperature = 0.3},
                                    {.temperature = 1e-309},
                                    {.temperature = 0.8, .top_k = 7},
                                    {.temperature = 0.8, .top_k = 1000},
                                    {.temperature = 1.2, .top_p = 0.7},
                                    {.temperature = 1.2, .top_p = 0.0},
                                    {.temperature = 5.0, .top_k = 40, .top_p = 0.95},
                                    {.repetition_penalty = 1.3},
                                    {.temperature = 1.0, .top_p = 0.9, .repetition_penalty = 0.7}}) {
    for (int round = 0; round < 50; ++round) {
      const auto logits = torch::empty({kRows, 258});
      auto values = logits.accessor<float, 2>();
      std::vector<Draw> rows;
      for (std::int64_t row = 0; row < kRows; ++row) {
        // Whole numbers, so that many are equal; some ids are excluded.
        for (std::int64_t id = 0; id < 258; ++id) {
          values[row][id] = random.below(20) == 0 ? -INFINITY : static_cast<float>(random.below(9)) - 4.0F;
        }
        seen[row].add(random.below(kVocab));
        const Draw draw{&seen[row], static_cast<std::uint64_t>(100 + row), ++draws};
        rows.push_back(round % 10 == 9 && row == 2 ? Draw{} : draw);
      }
      const auto drawn = sample_rows(logits.to(device).narrow(1, 0, kVocab), rows, options).to(torch::kCPU);
      for (std::int64_t row = 0; row < kRows; ++row) {
        EXPECT_TRUE(std::isfinite(drawn[row][1].item<double>()));
        if (rows[row].seen == nullptr) continue;
        Random numbers(rows[row].seed, rows[row].draws);
        const auto expected = sample({&values[row][0], kVocab}, seen[row], options, numbers);
        EXPECT_EQ(drawn[row][0].item<double>(), static_cast<double>(expected))
            << "T " << options.temperature << " k " << options.top_k << " p " << options.top_p << " row " << row;
      }
    }
  }
}

TEST(BatchSampler, TellsRowsThatTheSamplerRefuses) {
  const SeenIds seen(258);
  const std::vector<Draw> rows(4, {&seen, 1, 0});
  const auto logits = torch::zeros({4, 258});
  logits[1][7] = NAN;
  logits[2][7] = INFINITY;
  logits[3].fill_(-INFINITY);
  for (const auto& options :
       std::vector<SamplingOptions>{{}, {.temperature = 1.0}, {.temperature = 1.0, .top_p = 0.5}}) {
    const auto largest = sample_rows(logits, rows, options).select(1, 1);
    EXPECT_EQ(largest[0].item<double>(), 0.0);
    for (int row = 1; row < 4; ++row) EXPECT_FALSE(std::isfinite(largest[row].item<double>())) << row;
  }
}

}  // namespace
}  // namespace efla::engine
