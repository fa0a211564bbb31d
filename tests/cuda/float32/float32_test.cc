// The chunkwise kernels of float32 operands against the float64 reference, over the CPU's test matrix and sizes around
// their chunks, with the tolerances of the token recurrence.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "efla/cuda/float32/float32.h"
#include "efla/ref/delta.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"
#include "tests/support/delta_cases.h"
#include "tests/support/delta_results.h"
#include "tests/support/plain_delta.h"

namespace efla::test {
namespace {

// The forward and the backward of a case.
void run_chunk_float32(const DeltaCase& c, const DeviceData<float>& device, std::int64_t interval,
                       cudaStream_t stream = nullptr) {
  const PoisonedWorkspace forward(gpu::chunk_float32_fwd_workspace_bytes(c.shape(), c.rule())),
      backward(gpu::chunk_float32_bwd_workspace_bytes(c.shape(), c.rule()));
  const SavedStatesOnDevice states(c.shape(), interval);
  gpu::chunk_float32_fwd(states.in(device.forward()), forward.get(), stream);
  gpu::chunk_float32_bwd(states.in(device.backward()), backward.get(), stream);
  device.download();
  EXPECT_TRUE(forward.guards_intact() && backward.guards_intact());
}

// Runs a case twice, with the inputs of `data`, and compares the results with the reference's and with each other.
void expect_float32(const DeltaCase& c, DeltaData<float>& data, const Tolerance& tolerance) {
  DeltaData<float> plain(c, data), again = data;
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  ref::recurrent_bwd(exact.backward());
  plain_forward(plain.forward());
  plain_backward(plain.backward(), plain.initial_state.view());
  const DeviceData<float> device(data), device_again(again);
  const std::int64_t interval = (c.tokens < 300 ? 1 : 3) * gpu::kFloat32Tokens;
  run_chunk_float32(c, device, interval);
  run_chunk_float32(c, device_again, interval);
  EXPECT_TRUE(data.sentinels_intact());
  const Results got = all_results(data), repeated = all_results(again), expected = all_results(exact),
                naive = all_results(plain);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(disagreement(got[i].second, expected[i].second, naive[i].second, tolerance), "") << got[i].first;
    EXPECT_EQ(got[i].second, repeated[i].second) << got[i].first;
  }
}

class CudaFloat32 : public testing::TestWithParam<DeltaCase> {
 protected:
  void run(const Tolerance& tolerance) {
    DeltaData<float> data(GetParam());
    expect_float32(GetParam(), data, tolerance);
  }
};

TEST_P(CudaFloat32, Float32) { run(tolerance_of("float32")); }

std::vector<DeltaCase> float32_cases() {
  using enum Layout;
  std::vector<DeltaCase> cases;
  for (const DeltaCase& c : delta_cases()) {
    if (c.key_dim <= gpu::kFloat32MaxKeyDim) cases.push_back(c);
  }
  for (const std::int64_t dim : {48, 64, 128}) {
    for (const std::int64_t tokens : {1, 31, 32, 33, 63, 65, 784}) {
      cases.push_back({"exact", 1, 1, true, 1, tokens, 2, dim, dim, 1, contiguous, true, true, true});
    }
    for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
      DeltaCase grouped{"exact", 1, 1, false, 2, 200, 2, dim, dim, 1.5, contiguous, true, true, true};
      grouped.decay = decay;
      grouped.gate = 0.1;
      grouped.group = 4;
      cases.push_back(grouped);
      DeltaCase packed{"euler", 1, 1, true, 1, 900, 2, dim, dim, 1, contiguous, true, true, true};
      packed.decay = decay;
      packed.gate = 0.05;
      packed.cu_seqlens = {0, 0, 1, 32, 33, 193, 400, 400, 837, 900, 900};
      cases.push_back(packed);
      DeltaCase many{"exact", 1, 1, true, 3, 300, 5, dim, dim, 1, head_major, false, true, true};
      many.decay = decay;
      many.gate = 20;
      cases.push_back(many);
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Matrix, CudaFloat32, testing::ValuesIn(float32_cases()),
                         [](const auto& info) { return std::to_string(info.index) + "_" + name_of(info.param); });

std::vector<DeltaCase> two_key_float32_cases() {
  std::vector<DeltaCase> cases;
  for (const DeltaCase& c : two_key_cases_on_gpus()) {
    if (c.key_dim <= gpu::kFloat32MaxKeyDim) cases.push_back(c);
  }
  for (DeltaCase c : float32_cases()) {
    if (!c.qk_l2norm || c.key_dim % 16 != 0) continue;
    c.erase_key = EraseKey::gated;
    cases.push_back(c);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(TwoKeys, CudaFloat32, testing::ValuesIn(two_key_float32_cases()), indexed_name);

class CudaFloat32Fading : public CudaFloat32 {};
TEST_P(CudaFloat32Fading, Float32) { run(tolerance_of("fading float32 by chunks")); }

std::vector<DeltaCase> fading_cases_of_both_keys() {
  std::vector<DeltaCase> cases = fading_cases();
  for (DeltaCase c : fading_cases()) {
    c.key_dim = 64;
    cases.push_back(c);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Matrix, CudaFloat32Fading, testing::ValuesIn(fading_cases_of_both_keys()),
                         [](const auto& info) { return name_of(info.param); });

// Gates per key channel of every strength, some of them minus infinity.
TEST(CudaFloat32Channels, DeepGates) {
  for (const std::int64_t keys : {64, 100, 128}) {
    for (const double gate : {0.05, 4.8, 20.0}) {
      DeltaCase c{"exact", 1, 1, true, 1, 200, 2, keys, 80, 1, Layout::contiguous, true, true, true};
      c.decay = Decay::channel;
      c.gate = gate;
      SCOPED_TRACE(name_of(c));
      DeltaData<float> data(c);
      deepen_gates(data);
      expect_float32(c, data, tolerance_of("float32"));
    }
  }
}

// More sequences than a grid has rows in its second dimension, and a graph that replays the calls.
TEST(CudaFloat32Launch, ManySequencesInAGraph) {
  constexpr std::int64_t kSequences = 70'000;
  DeltaCase c{"exact", 1, 1, true, 1, kSequences, 1, 8, 4, 1, Layout::contiguous, true, true, true};
  for (std::int64_t n = 0; n <= kSequences; ++n) c.cu_seqlens.push_back(n);
  DeltaData<float> data(c);
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  ref::recurrent_bwd(exact.backward());
  const DeviceData<float> device(data);
  const PoisonedWorkspace forward(gpu::chunk_float32_fwd_workspace_bytes(c.shape(), c.rule())),
      backward(gpu::chunk_float32_bwd_workspace_bytes(c.shape(), c.rule()));
  const SavedStatesOnDevice states(c.shape(), 32);
  replay_in_graph([&](cudaStream_t stream) {
    gpu::chunk_float32_fwd(states.in(device.forward()), forward.get(), stream);
    gpu::chunk_float32_bwd(states.in(device.backward()), backward.get(), stream);
  });
  device.download();
  const Results got = all_results(data), expected = all_results(exact);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(distance(got[i].second, expected[i].second).rms, tolerance_of("float32").cap) << got[i].first;
  }
}

}  // namespace
}  // namespace efla::test
