// The chunkwise kernels: against their rounding oracle (chunk_oracle.h), which isolates faults from rounding, and
// against the float64 reference, with the oracle's own error as the yardstick.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/launch.h"
#include "efla/ref/delta.h"
#include "tests/cuda/device.h"
#include "tests/support/chunk_oracle.h"
#include "tests/support/compare.h"
#include "tests/support/delta_cases.h"

namespace efla::test {
namespace {

// A kernel sums in another order than the oracle, so that now and then a rounding falls to the other side. Over one
// chunk that changes little; over several the states drift apart by as much as rounding changes them. float16 rounds an
// eighth as much as bfloat16, but eight times as often to the other side.
template <class E>
double oracle_distance(std::int64_t tokens) {
  if (std::is_same_v<E, float16>) return tokens <= 64 ? 3.5e-4 : 1e-3;
  return tokens <= 64 ? 1e-3 : 8e-3;
}

// A case's problem without states at chunk boundaries.
template <class E>
DeltaForward<E> without_chunk_states(DeltaForward<E> p) {
  p.chunk_states = {};
  return p;
}

template <class E>
void run_chunk_fwd(const DeviceData<E>& device, const PoisonedWorkspace& workspace,
                   gpu::ChunkKernel kernel = gpu::ChunkKernel::automatic) {
  gpu::chunk_fwd(without_chunk_states(device.forward()), workspace.get(), nullptr, kernel);
  device.download();
}

// The states that a forward saves every `interval` tokens. Elements that no kernel writes are 1.
struct SavedChunkStates {
  std::int64_t interval;
  std::array<std::int64_t, 5> extent;
  std::vector<float> values;

  SavedChunkStates(const DeltaShape& s, std::int64_t interval)
      : interval(interval),
        extent{s.batch, s.chunks(interval), s.value_heads, s.key_dim, s.value_dim},
        values(View<float, 5>::contiguous(nullptr, extent).size(), 1.0F) {}

  // Returns the problem with its states in `memory`, of the host or the device.
  template <class E>
  DeltaForward<E> problem(DeltaForward<E> p, void* memory) const {
    p.chunk_states = View<float, 5>::contiguous(static_cast<float*>(memory), extent);
    p.saved = {interval};
    return p;
  }
  std::size_t bytes() const { return values.size() * sizeof(float); }
  std::vector<double> as_double() const { return {values.begin(), values.end()}; }
};

// Runs the forward with states saved.
template <class E>
void run_chunk_fwd(const DeviceData<E>& device, const PoisonedWorkspace& workspace, gpu::ChunkKernel kernel,
                   SavedChunkStates& states) {
  const DeviceBytes memory(states.bytes());
  gpu::check(cudaMemcpy(memory.data(), states.values.data(), states.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  gpu::chunk_fwd(states.problem(device.forward(), memory.data()), workspace.get(), nullptr, kernel);
  device.download();
  gpu::check(cudaMemcpy(states.values.data(), memory.data(), states.bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
}

// Runs the forward twice with the inputs of `data` and compares the results with the oracle's and the reference's.
template <class E>
void expect_forward(const DeltaCase& c, DeltaData<E>& data, gpu::ChunkKernel kernel) {
  DeltaData<E> again = data, oracle = data;
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  SavedChunkStates states(c.shape(), (c.tokens < 300 ? 1 : 3) * gpu::kChunkTokens), oracle_states = states;
  const bool cut = kernel == gpu::ChunkKernel::sweep ||
                   (kernel == gpu::ChunkKernel::fused && (c.decay == Decay::channel || c.erase_key != EraseKey::none));
  chunk_oracle_forward(oracle_states.problem(oracle.forward(), oracle_states.values.data()),
                       cut ? gpu::segments_of(c.shape()) : 1);
  DeviceData<E> device(data), device_again(again);
  PoisonedWorkspace workspace(gpu::chunk_fwd_workspace_bytes(c.shape(), c.rule()));
  run_chunk_fwd(device, workspace, kernel);
  EXPECT_TRUE(workspace.guards_intact());
  run_chunk_fwd(device_again, workspace, kernel, states);  // the workspace now holds the first run's records
  EXPECT_TRUE(data.sentinels_intact());
  EXPECT_TRUE(data.o.same_bits(again.o) && data.final_state.same_bits(again.final_state));
  const Tolerance& tolerance = tolerance_of(std::string(DTypeOf<E>::name) + " by chunks");
  EXPECT_LE(distance(states.as_double(), oracle_states.as_double()).rms, oracle_distance<E>(c.tokens));
  EXPECT_LE(distance(data.o.values(), oracle.o.values()).rms, oracle_distance<E>(c.tokens));
  EXPECT_EQ(disagreement(data.o.values(), exact.o.values(), oracle.o.values(), tolerance), "");
  if (c.final_state) {
    EXPECT_LE(distance(data.final_state.values(), oracle.final_state.values()).rms, oracle_distance<E>(c.tokens));
    EXPECT_EQ(
        disagreement(data.final_state.values(), exact.final_state.values(), oracle.final_state.values(), tolerance),
        "");
  }
}

// Runs a case with inputs of type E.
template <class E>
void run_forward_case(const DeltaCase& c, gpu::ChunkKernel kernel) {
  const bool divided = gpu::divides_keys(c.shape());
  if ((kernel != gpu::ChunkKernel::portable || divided) && !gpu::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  if (divided && kernel != gpu::ChunkKernel::sweep) GTEST_SKIP() << "the sweep alone divides keys";
  DeltaData<E> data(c);
  expect_forward(c, data, kernel);
}

class CudaChunk : public testing::TestWithParam<DeltaCase> {};
TEST_P(CudaChunk, Portable) { run_forward_case<bfloat16>(GetParam(), gpu::ChunkKernel::portable); }
TEST_P(CudaChunk, Sweep) { run_forward_case<bfloat16>(GetParam(), gpu::ChunkKernel::sweep); }
TEST_P(CudaChunk, Fused) { run_forward_case<bfloat16>(GetParam(), gpu::ChunkKernel::fused); }

class CudaChunkFloat16 : public testing::TestWithParam<DeltaCase> {};
TEST_P(CudaChunkFloat16, Portable) { run_forward_case<float16>(GetParam(), gpu::ChunkKernel::portable); }
TEST_P(CudaChunkFloat16, Sweep) { run_forward_case<float16>(GetParam(), gpu::ChunkKernel::sweep); }
TEST_P(CudaChunkFloat16, Fused) { run_forward_case<float16>(GetParam(), gpu::ChunkKernel::fused); }

std::vector<DeltaCase> chunk_cases() {
  using enum Layout;
  std::vector<DeltaCase> cases;
  for (const DeltaCase& c : delta_cases()) {
    if (chunks_take(c) && (has_aligned_rows(c) || !gpu::divides_keys(c.shape()))) cases.push_back(c);
  }
  // Sizes that the fast paths take, with lengths around the chunk of 64 tokens.
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t tokens : {1, 63, 64, 65, 127, 128, 129, 1000, 4097}) {
      if (dim == 256 && tokens > 129) continue;  // the oracle takes too long
      cases.push_back({"exact", 1, 1, true, 1, tokens, 2, dim, dim, 1, contiguous, true, true, false});
    }
    for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
      if (dim == 256 && decay == Decay::channel) continue;
      DeltaCase grouped{"exact", 1, 1, false, 2, 200, 2, dim, dim, 1.5, contiguous, true, true, false};
      grouped.decay = decay;
      grouped.gate = 0.1;
      grouped.group = dim == 256 ? 2 : 4;
      cases.push_back(grouped);
      DeltaCase packed{"euler", 1, 1, true, 1, 900, 2, dim, dim, 1, contiguous, true, true, false};
      packed.decay = decay;
      packed.gate = 0.05;
      packed.cu_seqlens = {0, 0, 1, 64, 65, 193, 400, 400, 837, 900, 900};
      cases.push_back(packed);
      DeltaCase many{"exact", 1, 1, true, 3, dim == 256 ? 200 : 700, 5, dim, dim, 1, head_major, false, true, false};
      many.decay = decay;
      many.gate = 20;
      cases.push_back(many);
    }
  }
  // Short keys, and gates that leave the range of exponents of float16 in some channels of a block.
  for (const std::int64_t dim : {64, 128}) {
    DeltaCase steep{"exact", 1, 1, true, 2, 150, 2, dim, dim, 0.03, contiguous, true, true, false};
    steep.decay = Decay::channel;
    steep.gate = 3;
    cases.push_back(steep);
  }
  for (const auto& [keys, values] : {std::pair{136, 64}, {192, 40}, {200, 512}, {248, 8}}) {
    DeltaCase c{"exact", 1, 1, true, 2, 150, 2, keys, values, 1, contiguous, true, true, false};
    c.decay = Decay::scalar;
    c.gate = 0.05;
    cases.push_back(c);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Matrix, CudaChunk, testing::ValuesIn(chunk_cases()), indexed_name);
INSTANTIATE_TEST_SUITE_P(Matrix, CudaChunkFloat16, testing::ValuesIn(taken_in_float16(chunk_cases())), indexed_name);
INSTANTIATE_TEST_SUITE_P(TwoKeys, CudaChunk, testing::ValuesIn(two_key_chunk_cases(chunk_cases())), indexed_name);
INSTANTIATE_TEST_SUITE_P(TwoKeys, CudaChunkFloat16,
                         testing::ValuesIn(taken_in_float16(two_key_chunk_cases(chunk_cases()))), indexed_name);

// A product of a query and a key above 65504 is infinite as a factor, so that the outputs of its token are not finite;
// other sequences are not touched (docs/numerics.md).
TEST(CudaChunkFloat16Range, ScoresOverflow) {
  DeltaCase c{"euler", 1, 1, false, 2, 100, 1, 64, 64, 1, Layout::contiguous, false, false, false};
  c.scale = 1;
  DeltaData<float16> data(c), untouched(c);
  for (std::int64_t i = 0; i < c.key_dim; ++i) {
    data.q.view()(0, 70, 0, i) = to_float16(2000);
    data.k.view()(0, 70, 0, i) = to_float16(2);
  }
  const DeviceData<float16> device(data), device_untouched(untouched);
  const PoisonedWorkspace workspace(gpu::chunk_fwd_workspace_bytes(c.shape(), c.rule()));
  run_chunk_fwd(device, workspace);
  run_chunk_fwd(device_untouched, workspace);
  const auto o = data.o.view(), before = untouched.o.view();
  for (std::int64_t j = 0; j < c.value_dim; ++j) {
    EXPECT_FALSE(std::isfinite(to_float(o(0, 70, 0, j)))) << j;
    for (std::int64_t t = 0; t < 64; ++t) EXPECT_EQ(o(0, t, 0, j).bits, before(0, t, 0, j).bits) << t << ' ' << j;
    for (std::int64_t t = 0; t < c.tokens; ++t) EXPECT_EQ(o(1, t, 0, j).bits, before(1, t, 0, j).bits) << t << ' ' << j;
  }
}

// A gate of minus infinity clears the state.
template <class E>
void expect_infinite_decay() {
  for (const Decay decay : {Decay::scalar, Decay::channel}) {
    DeltaCase c{"exact", 1, 1, true, 1, 200, 1, 64, 64, 1, Layout::contiguous, true, true, false};
    c.decay = decay;
    c.gate = 0.1;
    DeltaData<E> data(c);
    for (std::int64_t i = 0; i < data.g.view().extent[3]; ++i) {
      data.g.view()(0, 100, 0, i) = -std::numeric_limits<float>::infinity();
    }
    DeltaData<double> exact(c, data);
    ref::recurrent_fwd(exact.forward());
    DeviceData<E> device(data);
    PoisonedWorkspace workspace(gpu::chunk_fwd_workspace_bytes(c.shape(), c.rule()));
    run_chunk_fwd(device, workspace);
    EXPECT_LE(distance(data.o.values(), exact.o.values()).rms, kUnit<E> * 6e-3);
    EXPECT_LE(distance(data.final_state.values(), exact.final_state.values()).rms, kUnit<E> * 6e-3);
  }
}

TEST(CudaChunkGates, InfiniteDecay) { expect_infinite_decay<bfloat16>(); }
TEST(CudaChunkGates, InfiniteDecayFloat16) { expect_infinite_decay<float16>(); }

// Problems whose walks may begin from zeros (efla/cuda/chunk/sweep/truncation_sm90.cuh).
struct TruncationCase {
  const char* name;
  DeltaCase c;
};
std::ostream& operator<<(std::ostream& out, const TruncationCase& truncation) { return out << truncation.name; }

std::vector<TruncationCase> truncation_cases() {
  const DeltaCase exact{"exact", 1, 1, false, 1, 2900, 4, 128, 128, 1, Layout::contiguous, true, true, false};
  std::vector<TruncationCase> cases{{"exact", exact}};
  const auto add = [&](const char* name, auto&& change) {
    cases.push_back({name, exact});
    change(cases.back().c);
  };
  add("narrow", [](DeltaCase& c) { c.key_dim = c.value_dim = 64; });
  add("values_of_72", [](DeltaCase& c) { c.value_dim = 72; });
  add("l2norm", [](DeltaCase& c) { c.step = "euler", c.qk_l2norm = true; });
  add("long_keys", [](DeltaCase& c) { c.step = "euler", c.key_norm = 1.6; });  // some erase more than twice
  add("grouped", [](DeltaCase& c) { c.heads = 2, c.group = 2, c.batch = 2, c.tokens = 2100; });
  add("packed", [](DeltaCase& c) {
    c.cu_seqlens = {0, 5000, 5014};
    c.heads = 1, c.group = 4, c.tokens = 5014, c.key_dim = c.value_dim = 64;
  });
  for (TruncationCase& each : cases) each.c.decay = Decay::scalar;
  return cases;
}

// Gates of value heads 0 to 3: strong; weak; strong in the second half only; strong in every second chunk.
template <class E>
void draw_gates(DeltaData<E>& data, std::int64_t tokens) {
  const auto g = data.g.view();
  for (std::int64_t b = 0; b < g.extent[0]; ++b) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float strong = -0.1F - 0.1F * static_cast<float>(t % 7) / 7, weak = strong / 1000;
      g(b, t, 0, 0) = strong;
      g(b, t, 1, 0) = weak;
      g(b, t, 2, 0) = 2 * t < tokens ? weak : strong;
      g(b, t, 3, 0) = t / gpu::kChunkTokens % 2 == 0 ? weak : 3 * strong;
    }
  }
}

class CudaChunkTruncation : public testing::TestWithParam<TruncationCase> {};

template <class E>
void run_truncation_case(const DeltaCase& c) {
  if (!gpu::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  ASSERT_GT(gpu::forgetting_segments_of(c.shape(), c.rule()), 1);
  DeltaData<E> data(c);
  draw_gates(data, c.tokens);
  expect_forward(c, data, gpu::ChunkKernel::sweep);
}
TEST_P(CudaChunkTruncation, Bfloat16) { run_truncation_case<bfloat16>(GetParam().c); }
TEST_P(CudaChunkTruncation, Float16) { run_truncation_case<float16>(GetParam().c); }
INSTANTIATE_TEST_SUITE_P(Cases, CudaChunkTruncation, testing::ValuesIn(truncation_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Values that end before a segment's warm-up are all that its state consists of, however far they have decayed: they
// must not be left out. Nor may NaN be forgotten.
TEST(CudaChunkTruncation, KeepsWhatIsLeftAlone) {
  if (!gpu::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  const DeltaCase c = truncation_cases()[0].c;
  const int segments = gpu::forgetting_segments_of(c.shape(), c.rule());
  const std::int64_t length = gpu::segment_chunks(gpu::chunk_slots(c.shape()), segments) * gpu::kChunkTokens,
                     last = 2 * length - 4 * gpu::kChunkTokens;  // strong gates forget within four chunks
  DeltaData<bfloat16> data(c);
  draw_gates(data, c.tokens);
  const auto v = data.v.view();
  for (std::int64_t t = last; t < c.tokens; ++t) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t j = 0; j < c.value_dim; ++j) v(0, t, h, j) = to_bfloat16(0);
    }
  }
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  const PoisonedWorkspace workspace(gpu::chunk_fwd_workspace_bytes(c.shape(), c.rule()));
  DeviceData<bfloat16> device(data);
  run_chunk_fwd(device, workspace, gpu::ChunkKernel::sweep);
  std::vector<double> got, expected;
  for (std::int64_t j = 0; j < c.value_dim; ++j) {
    got.push_back(to_float(data.o.view()(0, 2 * length, 0, j)));
    expected.push_back(exact.o.view()(0, 2 * length, 0, j));
  }
  EXPECT_LE(distance(got, expected).rms, 2e-2);  // of numbers far below the values, not of zeros
  v(0, 10, 0, 0) = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  DeviceData<bfloat16> poisoned(data);
  run_chunk_fwd(poisoned, workspace, gpu::ChunkKernel::sweep);
  EXPECT_TRUE(std::isnan(to_float(data.o.view()(0, c.tokens - 1, 0, 0))));
  EXPECT_FALSE(std::isnan(to_float(data.o.view()(0, c.tokens - 1, 0, 40))));
}

// A packed sequence that is shorter than the mean: its chunks fill the segments that forget, but not all of the
// segments with maps, so that a walk that is computed again has no chunk of its own. Its values end in the first chunk.
TEST(CudaChunkTruncation, ComputesEmptySegmentsAgain) {
  if (!gpu::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  DeltaCase c{"exact", 1, 1, false, 1, 8000, 1, 128, 128, 1, Layout::contiguous, true, true, false};
  c.decay = Decay::scalar;
  c.cu_seqlens = {0, 590, 7400, 8000};
  const std::int64_t chunks = 10;
  const int forgetting = gpu::forgetting_segments_of(c.shape(), c.rule()), segments = gpu::segments_of(c.shape());
  ASSERT_LT((forgetting - 1) * gpu::segment_chunks(chunks, forgetting), chunks);
  ASSERT_GE((segments - 1) * gpu::segment_chunks(chunks, segments), chunks);
  DeltaData<bfloat16> data(c);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    data.g.view()(0, t, 0, 0) = -0.3F;
    for (std::int64_t j = 0; j < c.value_dim && t >= gpu::kChunkTokens && t < 590; ++j) {
      data.v.view()(0, t, 0, j) = to_bfloat16(0);
    }
  }
  expect_forward(c, data, gpu::ChunkKernel::sweep);
}

// More sequences than a grid has rows in its second dimension, and a graph that replays the call.
TEST(CudaChunkLaunch, ManySequencesInAGraph) {
  constexpr std::int64_t kSequences = 70'000;
  DeltaCase c{"exact", 1, 1, true, 1, kSequences, 1, 64, 8, 1, Layout::contiguous, false, false, false};
  for (std::int64_t n = 0; n <= kSequences; ++n) c.cu_seqlens.push_back(n);
  DeltaData<bfloat16> data(c), again(c), oracle(c);
  chunk_oracle_forward(without_chunk_states(oracle.forward()));
  DeviceData<bfloat16> device(data);
  PoisonedWorkspace workspace(gpu::chunk_fwd_workspace_bytes(c.shape(), c.rule()));
  replay_in_graph(
      [&](cudaStream_t stream) { gpu::chunk_fwd(without_chunk_states(device.forward()), workspace.get(), stream); });
  device.download();
  EXPECT_LE(distance(data.o.values(), oracle.o.values()).rms, oracle_distance<bfloat16>(1));
}

}  // namespace
}  // namespace efla::test
