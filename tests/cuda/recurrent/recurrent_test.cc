// The recurrence and its gradients on the GPU against the float64 reference, over the CPU's test matrix, with the CPU's
// tolerances.
#include <gtest/gtest.h>

#include <string>

#include "efla/ref/delta.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"
#include "tests/support/delta_cases.h"
#include "tests/support/delta_results.h"
#include "tests/support/plain_delta.h"

namespace efla::test {
namespace {

class CudaRecurrent : public testing::TestWithParam<DeltaCase> {
 protected:
  template <class T>
  void run() {
    const DeltaCase& c = GetParam();
    DeltaData<T> data(c), plain(c), again(c);
    DeltaData<double> exact(c, data);
    ref::recurrent_fwd(exact.forward());
    plain_forward(plain.forward());
    DeviceData<T> device(data), device_again(again);
    for (auto* side : {&device, &device_again}) {
      gpu::recurrent_fwd(side->forward(), nullptr);
      side->download();
    }
    EXPECT_TRUE(data.sentinels_intact());
    EXPECT_TRUE(data.o.same_bits(again.o) && data.final_state.same_bits(again.final_state));
    const Tolerance& tolerance = tolerance_of(DTypeOf<T>::name);
    EXPECT_EQ(disagreement(data.o.values(), exact.o.values(), plain.o.values(), tolerance), "");
    if (c.final_state) {
      EXPECT_EQ(
          disagreement(data.final_state.values(), exact.final_state.values(), plain.final_state.values(), tolerance),
          "");
    }
    for (std::int64_t n = 0; n < c.shape().sequences(); ++n) expect_chunk_states(data, exact, n, tolerance);

    ref::recurrent_bwd(exact.backward());
    plain_backward(plain.backward(), plain.initial_state.view());
    const PoisonedWorkspace workspace(gpu::recurrent_bwd_workspace_bytes(c.shape(), c.rule()));
    for (auto* side : {&device, &device_again}) {
      gpu::recurrent_bwd(side->backward(), workspace.get(), nullptr);
      side->download();
    }
    EXPECT_TRUE(data.sentinels_intact() && workspace.guards_intact());
    const Results got = backward_results(data), repeated = backward_results(again), expected = backward_results(exact),
                  naive = backward_results(plain);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(disagreement(got[i].second, expected[i].second, naive[i].second, tolerance), "") << got[i].first;
      EXPECT_EQ(got[i].second, repeated[i].second) << got[i].first;
    }
  }

  // Compares the states at the chunk boundaries of sequence n with the reference's.
  template <class T>
  void expect_chunk_states(DeltaData<T>& data, DeltaData<double>& exact, std::int64_t n, const Tolerance& tolerance) {
    const Sequence at = sequence_of(data.forward(), n);
    std::vector<double> got, expected;
    const auto states = data.chunk_states.view();
    const auto exact_states = exact.chunk_states.view();
    for (std::int64_t t = at.begin; t < at.end; t += kChunk) {
      for (std::int64_t h = 0; h < states.extent[2]; ++h) {
        for (std::int64_t i = 0; i < states.extent[3]; ++i) {
          for (std::int64_t j = 0; j < states.extent[4]; ++j) {
            got.push_back(states(at.i_b, at.chunk(t), h, i, j));
            expected.push_back(exact_states(at.i_b, at.chunk(t), h, i, j));
          }
        }
      }
    }
    EXPECT_TRUE(got.empty() || distance(got, expected).rms <= tolerance.cap);
  }
};

TEST_P(CudaRecurrent, Float32) { run<float>(); }
TEST_P(CudaRecurrent, Bfloat16) { run<bfloat16>(); }
TEST_P(CudaRecurrent, Float16) {
  if (!float16_holds(GetParam())) GTEST_SKIP() << "results are beyond float16's range";
  run<float16>();
}

INSTANTIATE_TEST_SUITE_P(Matrix, CudaRecurrent, testing::ValuesIn(delta_cases()),
                         [](const auto& info) { return name_of(info.param); });
INSTANTIATE_TEST_SUITE_P(TwoKeys, CudaRecurrent, testing::ValuesIn(two_key_cases_on_gpus()), indexed_name);

// More sequences than a grid has rows in its second dimension, and a graph that replays the calls.
TEST(CudaRecurrentLaunch, ManySequencesInAGraph) {
  constexpr std::int64_t kSequences = 70'000;
  DeltaCase c{"exact", 1, 1, true, 1, kSequences, 1, 8, 4, 1, Layout::contiguous, true, true, true};
  for (std::int64_t n = 0; n <= kSequences; ++n) c.cu_seqlens.push_back(n);
  DeltaData<float> data(c);
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  ref::recurrent_bwd(exact.backward());
  const DeviceData<float> device(data);
  const PoisonedWorkspace workspace(gpu::recurrent_bwd_workspace_bytes(c.shape(), c.rule()));
  replay_in_graph([&](cudaStream_t stream) {
    gpu::recurrent_fwd(device.forward(), stream);
    gpu::recurrent_bwd(device.backward(), workspace.get(), stream);
  });
  device.download();
  const Results got = backward_results(data), expected = backward_results(exact);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(distance(got[i].second, expected[i].second).rms, tolerance_of("float32").cap) << got[i].first;
  }
}

}  // namespace
}  // namespace efla::test
