// Functions that are replayed as CUDA graphs; all tests need a GPU.
#include "efla/torch/graph_replay.h"

#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#include "efla/torch/context.h"

namespace efla::libtorch {
namespace {

using torch::Tensor;

// The first call with a shape computes at once, the second captures, and the third replays.
TEST(OnAGpu, ReplayedGraphsComputeWhatTheFunctionComputes) {
  if (!torch::cuda::is_available() || !has_gpu_kernels())
    GTEST_SKIP() << "no GPU that LibTorch and the kernels can use";
  Tensor sum = torch::zeros({}, at::kCUDA);
  const auto add_squares = [&](const std::vector<Tensor>& inputs) {
    const Tensor squares = inputs[0] * inputs[0];
    sum.add_(squares.sum());
    return std::vector<Tensor>{squares};
  };
  GraphReplay replay;
  double expected = 0.0;
  for (int round = 0; round < 3; ++round) {
    for (const std::int64_t count : {5, 1 << 20, 7}) {
      const Tensor x = torch::full({count}, 1.0 + round, at::kCUDA);
      const double square = (1.0 + round) * (1.0 + round);
      EXPECT_EQ(replay.call(add_squares, {x}, {sum}).front().eq(square).sum().item<std::int64_t>(), count) << round;
      expected += square * static_cast<double>(count);
      EXPECT_DOUBLE_EQ(sum.item<double>(), expected) << round;
    }
  }
}

TEST(OnAGpu, AGraphIsCapturedAgainForOtherTensorsHeld) {
  if (!torch::cuda::is_available() || !has_gpu_kernels())
    GTEST_SKIP() << "no GPU that LibTorch and the kernels can use";
  GraphReplay replay;
  for (int i = 0; i < 2; ++i) {
    Tensor sum = torch::zeros({3}, at::kCUDA);
    const auto add = [&](const std::vector<Tensor>& inputs) { return std::vector<Tensor>{sum.add_(inputs[0])}; };
    for (int call = 1; call <= 3; ++call) {
      replay.call(add, {torch::ones({3}, at::kCUDA)}, {sum});
      EXPECT_EQ(sum.sum().item<double>(), 3.0 * call) << i;
    }
  }
}

// Threads end their graphs at the same time, while others replay theirs, as the runs of a study may.
TEST(OnAGpu, GraphsOfSeveralThreadsComeAndGo) {
  if (!torch::cuda::is_available() || !has_gpu_kernels())
    GTEST_SKIP() << "no GPU that LibTorch and the kernels can use";
  constexpr int kThreads = 16, kRounds = 20, kShapes = 32, kMoreCalls = 6;
  std::barrier all_captured(kThreads);
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, replays_on = i % 2 == 0] {
      const OwnStream stream({Device::Kind::cuda, 0});
      const auto twice = [](const std::vector<Tensor>& inputs) { return std::vector<Tensor>{2 * inputs[0]}; };
      for (int round = 0; round < kRounds; ++round) {
        auto replay = std::make_unique<GraphReplay>();
        const auto call_all_shapes = [&](int call) {
          for (int count = 1; count <= kShapes; ++count) {
            const Tensor x = torch::full({count}, call + 1.0, at::kCUDA);
            right += replay->call(twice, {x}, {}).front().equal(2 * x) ? 1 : 0;
          }
        };
        for (int call = 0; call < 2; ++call) call_all_shapes(call);
        all_captured.arrive_and_wait();
        for (int call = 0; replays_on && call < kMoreCalls; ++call) call_all_shapes(call);
        replay.reset();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, kRounds * kShapes * (kThreads * 2 + kThreads / 2 * kMoreCalls));
}

}  // namespace
}  // namespace efla::libtorch
