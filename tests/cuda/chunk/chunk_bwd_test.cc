// The chunkwise backward on the GPU against the float64 reference, with the error of its rounding oracle
// (chunk_bwd_oracle.h) as the yardstick.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/launch.h"
#include "efla/ref/delta.h"
#include "tests/cuda/device.h"
#include "tests/support/chunk_bwd_oracle.h"
#include "tests/support/compare.h"
#include "tests/support/delta_cases.h"
#include "tests/support/delta_results.h"

namespace efla::test {
namespace {

// Runs the forward, which saves states every `interval` tokens, and the backward with a poisoned workspace.
template <class E>
void run_chunk_bwd(const DeltaData<E>& host, const DeviceData<E>& device, const PoisonedWorkspace& workspace,
                   std::int64_t interval, gpu::ChunkKernel kernel = gpu::ChunkKernel::automatic, bool by_chunks = false,
                   bool in_graph = false) {
  const SavedStatesOnDevice states(host.shape, interval);
  const DeltaForward<E> forward = states.in(device.forward());
  if (by_chunks) {
    const PoisonedWorkspace own(gpu::chunk_fwd_workspace_bytes(host.shape, host.rule));
    gpu::chunk_fwd(forward, own.get(), nullptr);
    gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  } else {
    gpu::recurrent_fwd(forward, nullptr);
  }
  const DeltaBackward<E> backward = states.in(device.backward());
  workspace.poison();
  const auto call = [&](cudaStream_t stream) { gpu::chunk_bwd(backward, workspace.get(), stream, kernel); };
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  if (in_graph) {
    replay_in_graph(call);
  } else {
    call(nullptr);
  }
  device.download();
}

// Runs a case with inputs of type E.
template <class E>
void run_backward_case(const DeltaCase& c) {
  if (gpu::divides_keys(c.shape()) && !gpu::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  DeltaData<E> oracle(c);
  DeltaData<double> exact(c, oracle);
  ref::recurrent_fwd(exact.forward());
  ref::recurrent_bwd(exact.backward());
  chunk_oracle_backward(oracle.forward(), oracle.backward());
  const Results expected = backward_results(exact), of_oracle = backward_results(oracle);
  const PoisonedWorkspace workspace(gpu::chunk_bwd_workspace_bytes(DeviceData<E>(oracle).backward()));
  for (const auto& [name, kernel] :
       {std::pair{"portable", gpu::ChunkKernel::portable}, std::pair{"automatic", gpu::ChunkKernel::automatic}}) {
    SCOPED_TRACE(name);
    DeltaData<E> data(c), again(c);
    const DeviceData<E> device(data), device_again(again);
    run_chunk_bwd(data, device, workspace, 64, kernel);
    EXPECT_TRUE(workspace.guards_intact());
    run_chunk_bwd(again, device_again, workspace, 64, kernel);
    EXPECT_TRUE(data.sentinels_intact());
    const Results got = backward_results(data), repeated = backward_results(again);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].second, repeated[i].second) << got[i].first;
      EXPECT_EQ(disagreement(got[i].second, expected[i].second, of_oracle[i].second,
                             tolerance_of("gradients of " + std::string(DTypeOf<E>::name) + " by chunks")),
                "")
          << got[i].first;
    }
  }
}

class CudaChunkBackward : public testing::TestWithParam<DeltaCase> {};
TEST_P(CudaChunkBackward, Gradients) { run_backward_case<bfloat16>(GetParam()); }

class CudaChunkBackwardFloat16 : public testing::TestWithParam<DeltaCase> {};
TEST_P(CudaChunkBackwardFloat16, Gradients) { run_backward_case<float16>(GetParam()); }

std::vector<DeltaCase> chunk_bwd_cases() {
  using enum Layout;
  std::vector<DeltaCase> cases;
  for (const DeltaCase& c : delta_cases()) {
    if (chunks_take(c)) cases.push_back(c);
  }
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t tokens : {1, 63, 64, 65, 127, 129, 1000}) {
      if (dim == 256 && tokens > 129) continue;  // the oracle takes too long
      cases.push_back({"exact", 1, 1, true, 1, tokens, 2, dim, dim, 1, contiguous, true, true, true});
    }
    for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
      if (dim == 256 && decay == Decay::channel) continue;
      DeltaCase grouped{"exact", 1, 1, false, 2, 200, 2, dim, dim, 1.5, contiguous, true, true, true};
      grouped.decay = decay;
      grouped.gate = 0.1;
      grouped.group = dim == 256 ? 2 : 4;
      cases.push_back(grouped);
      DeltaCase packed{"euler", 1, 1, true, 1, 900, 2, dim, dim, 1, contiguous, true, true, true};
      packed.decay = decay;
      packed.gate = 0.05;
      packed.cu_seqlens = {0, 0, 1, 64, 65, 193, 400, 400, 837, 900, 900};
      cases.push_back(packed);
      DeltaCase many{"exact", 1, 1, true, 3, dim == 256 ? 130 : 300, 5, dim, dim, 1, head_major, false, true, true};
      many.decay = decay;
      many.gate = 20;
      cases.push_back(many);
    }
  }
  // Short keys, and gates that leave the range of exponents of float16 in some channels of a block.
  for (const std::int64_t dim : {64, 128}) {
    DeltaCase steep{"exact", 1, 1, true, 2, 150, 2, dim, dim, 0.03, contiguous, true, true, true};
    steep.decay = Decay::channel;
    steep.gate = 3;
    cases.push_back(steep);
  }
  for (const auto& [keys, values, layout] : {std::tuple{136, 64, contiguous},
                                             {192, 40, sliced},
                                             {200, 512, reversed},
                                             {248, 8, column_major},
                                             {256, 256, column_major}}) {
    DeltaCase c{"exact", 1, 1, true, 2, 150, 2, keys, values, 1, layout, true, true, true};
    c.decay = Decay::scalar;
    c.gate = 0.05;
    cases.push_back(c);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Matrix, CudaChunkBackward, testing::ValuesIn(chunk_bwd_cases()), indexed_name);
INSTANTIATE_TEST_SUITE_P(Matrix, CudaChunkBackwardFloat16, testing::ValuesIn(taken_in_float16(chunk_bwd_cases())),
                         indexed_name);
INSTANTIATE_TEST_SUITE_P(TwoKeys, CudaChunkBackward, testing::ValuesIn(two_key_chunk_cases(chunk_bwd_cases())),
                         indexed_name);
INSTANTIATE_TEST_SUITE_P(TwoKeys, CudaChunkBackwardFloat16,
                         testing::ValuesIn(taken_in_float16(two_key_chunk_cases(chunk_bwd_cases()))), indexed_name);

// Gates per channel of which some are minus infinity, some so strong that nothing survives a token, and the others
// weak.
template <class E>
void expect_deep_channels() {
  for (const std::int64_t dim : {64, 128}) {
    DeltaCase c{"exact", 1, 1, true, 1, 200, 1, dim, dim, 1, Layout::contiguous, true, true, true};
    c.decay = Decay::channel;
    c.gate = 0.05;
    DeltaData<E> data(c);
    deepen_gates(data);
    DeltaData<double> exact(c, data);
    ref::recurrent_fwd(exact.forward());
    ref::recurrent_bwd(exact.backward());
    const Results expected = backward_results(exact);
    const DeviceData<E> device(data);
    const PoisonedWorkspace workspace(gpu::chunk_bwd_workspace_bytes(c.shape(), c.rule()));
    for (const auto kernel : {gpu::ChunkKernel::portable, gpu::ChunkKernel::automatic}) {
      run_chunk_bwd(data, device, workspace, 64, kernel);
      const Results got = backward_results(data);
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_LE(distance(got[i].second, expected[i].second).rms, kUnit<E> * 8e-3) << got[i].first << ' ' << dim;
      }
    }
  }
}

TEST(CudaChunkBackwardGates, DeepInSomeChannels) { expect_deep_channels<bfloat16>(); }
TEST(CudaChunkBackwardGates, DeepInSomeChannelsFloat16) { expect_deep_channels<float16>(); }

// More sequences than a grid has rows in its second dimension, and a graph that replays the calls.
TEST(CudaChunkBackwardLaunch, ManySequencesInAGraph) {
  constexpr std::int64_t kSequences = 70'000;
  DeltaCase c{"exact", 1, 1, true, 1, kSequences, 1, 64, 8, 1, Layout::contiguous, false, true, false};
  for (std::int64_t n = 0; n <= kSequences; ++n) c.cu_seqlens.push_back(n);
  DeltaData<bfloat16> data(c);
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  ref::recurrent_bwd(exact.backward());
  const DeviceData<bfloat16> device(data);
  const PoisonedWorkspace workspace(gpu::chunk_bwd_workspace_bytes(c.shape(), c.rule()));
  const std::array<std::int64_t, 5> extent{1, c.shape().chunks(64), 1, c.key_dim, c.value_dim};
  const View<float, 5> shape = View<float, 5>::contiguous(nullptr, extent);
  const DeviceBytes states(static_cast<std::size_t>(shape.size()) * sizeof(float));
  gpu::check(cudaMemset(states.data(), 0, states.bytes()), "cudaMemset");  // before the only token of each sequence
  DeltaBackward<bfloat16> backward = device.backward();
  backward.saved = {64};
  backward.chunk_states = View<const float, 5>::contiguous(static_cast<const float*>(states.data()), extent);
  replay_in_graph([&](cudaStream_t stream) { gpu::chunk_bwd(backward, workspace.get(), stream); });
  device.download();
  const Results got = backward_results(data), expected = backward_results(exact);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(distance(got[i].second, expected[i].second).rms, 8e-3) << got[i].first;
  }
}

// States that the chunkwise forward saves at longer intervals give the same as the states of the recurrence at every
// chunk, to the rounding of the products.
template <class E>
void expect_intervals() {
  for (const auto& [decay, packed] : {std::pair{Decay::scalar, false}, std::pair{Decay::scalar, true},
                                      std::pair{Decay::channel, false}, std::pair{Decay::channel, true}}) {
    DeltaCase c{"exact", 1, 1, true, 1, 900, 2, 128, 128, 1, Layout::contiguous, true, true, true};
    c.decay = decay;
    c.gate = 0.05;
    if (packed) c.cu_seqlens = {0, 0, 1, 64, 65, 193, 400, 400, 837, 900, 900};
    DeltaData<E> every(c), some(c);
    const DeviceData<E> device_every(every), device_some(some);
    const PoisonedWorkspace workspace(gpu::chunk_bwd_workspace_bytes(c.shape(), c.rule()));
    run_chunk_bwd(every, device_every, workspace, 64);
    run_chunk_bwd(some, device_some, workspace, 192, gpu::ChunkKernel::automatic, true);
    const Results expected = backward_results(every), got = backward_results(some);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_LE(distance(got[i].second, expected[i].second).rms, kUnit<E> * 8e-3) << got[i].first;
    }
  }
}

TEST(CudaChunkBackwardStates, Intervals) { expect_intervals<bfloat16>(); }
TEST(CudaChunkBackwardStates, IntervalsFloat16) { expect_intervals<float16>(); }

// Replays of a graph give the bits of a call, for more sequences than a grid has rows in its second dimension and for a
// sequence that is long enough for all kernels to run at once.
TEST(CudaChunkBackwardLaunch, InAGraph) {
  constexpr std::int64_t kSequences = 70'000;
  DeltaCase many{"exact", 1, 1, true, 1, kSequences, 1, 64, 8, 1, Layout::contiguous, false, false, false};
  for (std::int64_t n = 0; n <= kSequences; ++n) many.cu_seqlens.push_back(n);
  DeltaCase deep{"exact", 1, 1, false, 2, 20'000, 2, 128, 128, 1, Layout::contiguous, true, true, true};
  deep.decay = Decay::scalar;
  deep.gate = 0.05;
  for (const DeltaCase& c : {many, deep}) {
    SCOPED_TRACE(name_of(c));
    DeltaData<bfloat16> called(c), replayed(c);
    const DeviceData<bfloat16> device_called(called), device_replayed(replayed);
    const PoisonedWorkspace workspace(gpu::chunk_bwd_workspace_bytes(c.shape(), c.rule()));
    constexpr auto kAutomatic = gpu::ChunkKernel::automatic;
    run_chunk_bwd(called, device_called, workspace, 1024, kAutomatic, true);
    run_chunk_bwd(replayed, device_replayed, workspace, 1024, kAutomatic, true, true);
    const Results expected = backward_results(called), got = backward_results(replayed);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(got[i].second == expected[i].second) << got[i].first;
      for (const double x : got[i].second) ASSERT_TRUE(std::isfinite(x)) << got[i].first;
    }
  }
}

}  // namespace
}  // namespace efla::test
