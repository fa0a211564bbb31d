// The same bits in every run: calls repeated with other contents of the workspace and NaN in the outputs.
//
// The environment variable EFLA_CUDA_REPEATS sets the number of repeats.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/launch.h"
#include "tests/cuda/device.h"
#include "tests/cuda/repeats.h"
#include "tests/support/delta_case.h"

namespace efla::test {
namespace {

int repeats() {
  const char* text = std::getenv("EFLA_CUDA_REPEATS");
  return text == nullptr ? 100 : std::atoi(text);
}

// What a call writes, and the workspaces that it may use.
class Written {
 public:
  // Adds a contiguous output if it is present. `whole`: the call writes every element.
  template <class T, int Rank>
  void add(const char* name, const View<T, Rank>& view, bool whole = true) {
    if (view) outputs_.push_back({name, words_of(view.data, view.size() * sizeof(T)), whole});
  }
  template <class T>
  void add(const DeltaForward<T>& p) {
    add("o", p.o);
    add("final_state", p.final_state);
    add("chunk_states", p.chunk_states, p.shape.packed == 0);
  }
  template <class T>
  void add(const DeltaBackward<T>& p) {
    add("dq", p.dq);
    add("dk", p.dk);
    add("dv", p.dv);
    add("derase_key", p.derase_key);
    add("dbeta", p.dbeta);
    add("dg", p.dg);
    add("dinitial_state", p.dinitial_state);
  }
  void add(const PoisonedWorkspace& workspace) {
    workspaces_.push_back(words_of(workspace.get().data, workspace.get().bytes));
  }

  // Calls once, then again and again, and expects the bits of the first call's outputs every time.
  void expect_same_bits(const std::function<void()>& call) const {
    const std::size_t outputs = outputs_.size();
    const DeviceBytes counts(2 * outputs * sizeof(unsigned long long));
    gpu::check(cudaMemset(counts.data(), 0, counts.bytes()), "cudaMemset");
    auto* const written = static_cast<unsigned long long*>(counts.data());
    auto* const differing = written + outputs;
    std::deque<DeviceBytes> memory;
    std::vector<Words> first;
    for (const Output& output : outputs_) {
      memory.emplace_back(output.words.count * sizeof(std::uint32_t));
      first.push_back(words_of(memory.back().data(), memory.back().bytes()));
      fill(first.back(), Poison::nan);
    }
    ASSERT_GE(repeats(), 1) << "EFLA_CUDA_REPEATS";
    for (int repeat = 0; repeat <= repeats(); ++repeat) {
      for (const Words& words : workspaces_) fill(words, static_cast<Poison>(repeat % 4), repeat);
      for (const Output& output : outputs_) fill(output.words, Poison::nan);
      call();
      for (std::size_t i = 0; i < outputs; ++i) {
        const Words& words = outputs_[i].words;
        count_differing(words, first[i], (repeat == 0 ? written : differing) + i);
        if (repeat > 0) continue;
        gpu::check(cudaMemcpyAsync(first[i].data, words.data, memory[i].bytes(), cudaMemcpyDeviceToDevice, nullptr),
                   "cudaMemcpyAsync");
      }
    }
    std::vector<unsigned long long> result(2 * outputs);
    gpu::check(cudaMemcpy(result.data(), counts.data(), counts.bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (std::size_t i = 0; i < outputs; ++i) {
      const auto words = static_cast<unsigned long long>(outputs_[i].words.count);
      EXPECT_TRUE(result[i] == words || (result[i] > 0 && !outputs_[i].whole))
          << outputs_[i].name << ": " << result[i] << " of " << words << " words written";
      EXPECT_EQ(result[outputs + i], 0U) << outputs_[i].name << ": words that differ in " << repeats() << " repeats";
    }
  }

 private:
  struct Output {
    std::string name;
    Words words;
    bool whole;
  };

  static Words words_of(void* data, std::size_t bytes) {
    EXPECT_EQ(bytes % sizeof(std::uint32_t), 0);
    return {static_cast<std::uint32_t*>(data), static_cast<std::int64_t>(bytes / sizeof(std::uint32_t))};
  }

  std::vector<Output> outputs_;
  std::vector<Words> workspaces_;
};

struct RepeatedCase {
  const char* name;
  gpu::ChunkKernel kernel;
  bool backward;
  DeltaCase c;
  std::int64_t interval = 256;  // tokens between saved states
};

std::ostream& operator<<(std::ostream& out, const RepeatedCase& repeated) { return out << repeated.name; }

class CudaRepeats : public testing::TestWithParam<RepeatedCase> {};

TEST_P(CudaRepeats, Chunks) {
  const auto& [name, kernel, backward, c, interval] = GetParam();
  if (kernel != gpu::ChunkKernel::portable && !gpu::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  DeltaData<bfloat16> host(c);
  const DeviceData<bfloat16> device(host);
  const SavedStatesOnDevice states(c.shape(), interval);
  const DeltaForward<bfloat16> forward = states.in(device.forward());
  const DeltaBackward<bfloat16> gradients = states.in(device.backward());
  const PoisonedWorkspace of_forward(gpu::chunk_fwd_workspace_bytes(c.shape(), c.rule())),
      of_backward(gpu::chunk_bwd_workspace_bytes(c.shape(), c.rule()));
  Written written;
  written.add(of_forward);
  written.add(forward);
  if (backward) {
    written.add(of_backward);
    written.add(gradients);
  }
  written.expect_same_bits([&, kernel = kernel, backward = backward] {
    gpu::chunk_fwd(forward, of_forward.get(), nullptr, kernel);
    if (backward) gpu::chunk_bwd(gradients, of_backward.get(), nullptr, kernel);
  });
  EXPECT_TRUE(of_forward.guards_intact() && of_backward.guards_intact());
}

// A case with all states and a gate.
DeltaCase gated(Decay decay, std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t keys,
                std::int64_t values, std::int64_t group = 1) {
  DeltaCase c{"exact", 1, 1, true, batch, tokens, heads, keys, values, 1, Layout::contiguous, true, true, true};
  c.decay = decay;
  c.gate = 0.1;
  c.group = group;
  return c;
}

DeltaCase with_two_keys(DeltaCase c) {
  c.erase_key = EraseKey::gated;
  return c;
}

constexpr std::int64_t kCutTokens = 2112;  // of one head, which are cut into segments

std::vector<RepeatedCase> repeated_cases() {
  using enum gpu::ChunkKernel;
  using enum Decay;
  DeltaCase packed = gated(scalar, 1, 900, 2, 128, 128);
  packed.cu_seqlens = {0, 0, 1, 64, 65, 193, 400, 400, 837, 900, 900};
  DeltaCase forgetting = gated(scalar, 1, kCutTokens, 1, 128, 128);  // within the warm-up of a segment
  forgetting.gate = 0.4;
  return {
      {"SegmentsForward", sweep, false, gated(none, 1, kCutTokens, 1, 128, 128)},
      {"ScalarForward", sweep, false, gated(scalar, 1, kCutTokens, 1, 128, 128)},
      {"ForgettingForward", sweep, false, forgetting},
      {"FusedForward", fused, false, gated(scalar, 2, 300, 2, 128, 128)},
      {"ChannelForward", sweep, false, gated(channel, 1, kCutTokens, 1, 128, 128)},
      {"ScalarBackward", sweep, true, gated(scalar, 8, 200, 16, 64, 128)},
      {"ClaimedBackward", sweep, true, gated(scalar, 1, 1024, 3, 128, 64)},
      {"GroupedBackward", sweep, true, gated(none, 1, 300, 2, 128, 128, 4)},
      {"ChannelBackward", sweep, true, gated(channel, 1, 1024, 2, 128, 128)},
      {"GroupedChannelBackward", sweep, true, gated(channel, 1, 300, 2, 64, 64, 2)},
      {"DividedKeysBackward", sweep, true, gated(scalar, 1, 300, 2, 256, 256, 2)},
      {"PackedBackward", sweep, true, packed},
      {"PortableBackward", portable, true, gated(scalar, 1, 300, 2, 128, 128)},
      {"TwoKeysForward", sweep, false, with_two_keys(gated(channel, 1, kCutTokens, 1, 128, 128))},
      {"TwoKeysPortableForward", portable, false, with_two_keys(gated(scalar, 1, 300, 2, 128, 128))},
      {"TwoKeysBackward", sweep, true, with_two_keys(gated(scalar, 1, 1024, 2, 128, 128))},
      {"GroupedTwoKeysBackward", sweep, true, with_two_keys(gated(channel, 1, 300, 2, 64, 64, 2))},
  };
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaRepeats, testing::ValuesIn(repeated_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(CudaRepeatsOf, SegmentsCutTheirSequences) {
  EXPECT_GT(gpu::segments_of(gated(Decay::none, 1, kCutTokens, 1, 128, 128).shape()), 2);
  const DeltaCase scalar = gated(Decay::scalar, 1, kCutTokens, 1, 128, 128);
  EXPECT_GT(gpu::forgetting_segments_of(scalar.shape(), scalar.rule()), 1);
}

void expect_same_float32(EraseKey erase_key) {
  for (const Decay decay : {Decay::scalar, Decay::channel}) {
    for (const std::int64_t dim : {64, 128}) {
      SCOPED_TRACE(dim);
      DeltaCase c = gated(decay, 1, 500, 2, dim, dim, 2);
      c.erase_key = erase_key;
      DeltaData<float> host(c);
      const DeviceData<float> device(host);
      const SavedStatesOnDevice states(c.shape(), 96);
      const DeltaForward<float> forward = states.in(device.forward());
      const DeltaBackward<float> backward = states.in(device.backward());
      const PoisonedWorkspace of_forward(gpu::chunk_float32_fwd_workspace_bytes(c.shape(), c.rule())),
          of_backward(gpu::chunk_float32_bwd_workspace_bytes(c.shape(), c.rule()));
      Written written;
      written.add(of_forward);
      written.add(of_backward);
      written.add(forward);
      written.add(backward);
      written.expect_same_bits([&] {
        gpu::chunk_float32_fwd(forward, of_forward.get(), nullptr);
        gpu::chunk_float32_bwd(backward, of_backward.get(), nullptr);
      });
      EXPECT_TRUE(of_forward.guards_intact() && of_backward.guards_intact());
    }
  }
}

TEST(CudaRepeatsOf, Float32) { expect_same_float32(EraseKey::none); }
TEST(CudaRepeatsOf, Float32WithTwoKeys) { expect_same_float32(EraseKey::gated); }

void expect_same_recurrence(EraseKey erase_key) {
  DeltaCase c = gated(Decay::channel, 1, 70, 2, 64, 64, 2);
  c.erase_key = erase_key;
  DeltaData<bfloat16> host(c);
  const DeviceData<bfloat16> device(host);
  const SavedStatesOnDevice states(c.shape(), gpu::kRecurrentInterval);
  const DeltaForward<bfloat16> forward = states.in(device.forward());
  const DeltaBackward<bfloat16> backward = states.in(device.backward());
  const PoisonedWorkspace workspace(gpu::recurrent_bwd_workspace_bytes(c.shape(), c.rule()));
  Written written;
  written.add(workspace);
  written.add(forward);
  written.add(backward);
  written.expect_same_bits([&] {
    gpu::recurrent_fwd(forward, nullptr);
    gpu::recurrent_bwd(backward, workspace.get(), nullptr);
  });
  EXPECT_TRUE(workspace.guards_intact());
}

TEST(CudaRepeatsOf, Recurrence) { expect_same_recurrence(EraseKey::none); }
TEST(CudaRepeatsOf, RecurrenceWithTwoKeys) { expect_same_recurrence(EraseKey::gated); }

// Every repeat begins with the same states.
void expect_same_steps(EraseKey erase_key) {
  DeltaCase c = gated(Decay::scalar, 4, 5, 2, 128, 128);
  c.erase_key = erase_key;
  DeltaData<bfloat16> host(c);
  const DeviceData<bfloat16> device(host);
  const DeltaForward<bfloat16> p = device.forward();
  const DeltaSteps<bfloat16, float> steps{p.shape, p.rule, p.q,           p.k, p.v, p.beta,
                                          p.g,     {},     p.final_state, p.o, {},  p.erase_key};
  Written written;
  written.add("o", steps.o);
  written.add("states", steps.states);
  written.expect_same_bits([&] {
    gpu::check(cudaMemcpyAsync(steps.states.data, p.initial_state.data, steps.states.size() * sizeof(float),
                               cudaMemcpyDeviceToDevice, nullptr),
               "cudaMemcpyAsync");
    gpu::step_fwd(steps, nullptr);
  });
}

TEST(CudaRepeatsOf, DecodeSteps) { expect_same_steps(EraseKey::none); }
TEST(CudaRepeatsOf, DecodeStepsWithTwoKeys) { expect_same_steps(EraseKey::gated); }

}  // namespace
}  // namespace efla::test
