// Bad problems: each is named with what was got and what was expected, before anything is computed.
#include "efla/rule/validate.h"
#include "efla/base/text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "efla/ops/delta.h"
#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"

namespace efla {
namespace {

using test::DeltaCase;
using test::DeltaData;
using test::expect_error;
using test::Layout;

const DeltaCase kCase{"exact", 1, 1, false, 2, 3, 4, 5, 6, 1, Layout::contiguous, true, true, true};

class Validate : public testing::Test {
 protected:
  DeltaData<float> data_{kCase};

  void forward(const std::function<void(DeltaForward<float>&)>& spoil, const char* argument, const char* says) {
    DeltaForward<float> p = data_.forward();
    spoil(p);
    expect_error([&] { delta_forward(p); }, argument, says);
    for (const double x : data_.o.values()) ASSERT_TRUE(std::isnan(x)) << "written, though the problem is bad";
  }
  void backward(const std::function<void(DeltaBackward<float>&)>& spoil, const char* argument, const char* says) {
    DeltaBackward<float> p = data_.backward();
    spoil(p);
    expect_error([&] { delta_backward(p); }, argument, says);
  }
};

TEST_F(Validate, AGoodProblemPasses) {
  EXPECT_NO_THROW(validate(data_.forward()));
  EXPECT_NO_THROW(validate(data_.backward()));
}

TEST_F(Validate, SizesOutOfRange) {
  forward([](auto& p) { p.shape.batch = 0; }, "batch size B", "got 0, expected 1 to 2147483647");
  forward([](auto& p) { p.shape.tokens = -1; }, "token count T", "got -1");
  forward([](auto& p) { p.shape.heads = 1LL << 40; }, "head count H", "got 1099511627776");
  forward([](auto& p) { p.shape.key_dim = 0; }, "key dim K", "got 0");
  forward([](auto& p) { p.shape.value_dim = 0; }, "value dim V", "got 0");
  forward([](auto& p) { p.shape.value_heads = 6; }, "value head count HV", "got 6, expected a multiple of H = 4");
  forward([](auto& p) { p.shape.batch = p.shape.tokens = 2147483647; }, "sizes B, T, H, K, V", "2^57 elements");
}

TEST_F(Validate, RulesOutOfRange) {
  forward([](auto& p) { p.rule.step = {Integrator::rk, 0}; }, "order", "got 0, expected 1 to 64");
  forward([](auto& p) { p.rule.step.integrator = Integrator(77); }, "integrator", "got 77, expected one of enum");
  forward([](auto& p) { p.rule.step.integrator = Integrator(-1); }, "integrator", "got -1, expected one of enum");
  forward([](auto& p) { p.rule.decay = Decay(77); }, "decay", "got 77, expected one of enum Decay");
  forward([](auto& p) { p.rule.step.erase_scale = NAN; }, "erase_scale", "got nan, expected a finite number");
  forward([](auto& p) { p.rule.step.write_scale = INFINITY; }, "write_scale", "got inf");
  forward([](auto& p) { p.rule.scale = -INFINITY; }, "scale", "got -inf");
}

TEST_F(Validate, MissingAndMisshapenInputs) {
  forward([](auto& p) { p.q.data = nullptr; }, "q", "got nothing, expected a tensor of shape [2, 3, 4, 5]");
  forward([](auto& p) { p.k.extent[3] = 6; }, "k", "got shape [2, 3, 4, 6], expected shape [2, 3, 4, 5]");
  forward([](auto& p) { p.v.extent[1] = 4; }, "v", "got shape [2, 4, 4, 6], expected shape [2, 3, 4, 6]");
  forward([](auto& p) { p.beta.extent[2] = 5; }, "beta", "got shape [2, 3, 5], expected shape [2, 3, 4]");
  forward([](auto& p) { p.initial_state.extent[0] = 1; }, "initial_state", "expected shape [2, 4, 5, 6]");
  forward([](auto& p) { p.o.data = nullptr; }, "o", "got nothing");
  forward([](auto& p) { p.final_state.extent[2] = 6; }, "final_state", "expected shape [2, 4, 5, 6]");
  forward([](auto& p) { p.chunk_states.extent[1] = 2; }, "chunk_states", "expected shape [2, 1, 4, 5, 6]");
}

TEST_F(Validate, MissingAndMisshapenGradients) {
  backward([](auto& p) { p.chunk_states.data = nullptr; }, "chunk_states", "got nothing");
  backward([](auto& p) { p.dout.extent[3] = 5; }, "dout", "expected shape [2, 3, 4, 6]");
  backward([](auto& p) { p.dfinal_state.extent[3] = 5; }, "dfinal_state", "expected shape [2, 4, 5, 6]");
  backward([](auto& p) { p.dq.data = nullptr; }, "dq", "got nothing");
  backward([](auto& p) { p.dk.extent[0] = 3; }, "dk", "expected shape [2, 3, 4, 5]");
  backward([](auto& p) { p.dv.data = nullptr; }, "dv", "got nothing");
  backward([](auto& p) { p.dbeta.extent[1] = 1; }, "dbeta", "expected shape [2, 3, 4]");
  backward([](auto& p) { p.dinitial_state.extent[1] = 1; }, "dinitial_state", "expected shape [2, 4, 5, 6]");
}

TEST_F(Validate, Decays) {
  DeltaCase c = kCase;
  c.decay = Decay::channel;
  DeltaData<float> decayed(c);
  const auto check = [&](const std::function<void(DeltaForward<float>&)>& spoil, const char* argument,
                         const char* says) {
    DeltaForward<float> p = decayed.forward();
    spoil(p);
    expect_error([&] { delta_forward(p); }, argument, says);
  };
  EXPECT_NO_THROW(validate(decayed.forward()));
  check([](auto& p) { p.g = {}; }, "g", "got nothing, expected a tensor of shape [2, 3, 4, 5]");
  check([](auto& p) { p.rule.decay = Decay::none; }, "g", "got a tensor, expected nothing, as the rule has no decay");
  check([](auto& p) { p.rule.decay = Decay::scalar; }, "g", "expected shape [2, 3, 4, 1]");
  DeltaBackward<float> backward = decayed.backward();
  backward.dg = {};
  expect_error([&] { delta_backward(backward); }, "dg", "got nothing");
}

TEST_F(Validate, EraseKeys) {
  forward([](auto& p) { p.rule.two_keys = true; }, "erase_key", "got nothing, expected a tensor of shape [2, 3, 4, 5]");
  forward([](auto& p) { p.erase_key = p.k; }, "erase_key", "got a tensor, expected nothing, as the rule has one key");
  backward([](auto& p) { p.derase_key = p.dk; }, "derase_key", "got a tensor, expected nothing");
  const auto use_two_keys = [](auto& p) {
    p.rule.two_keys = true;
    p.erase_key = p.k;
  };
  backward(use_two_keys, "derase_key", "got nothing, expected a tensor of shape [2, 3, 4, 5]");
  forward(
      [&](auto& p) {
        use_two_keys(p);
        p.erase_key.extent[3] = 6;
      },
      "erase_key", "got shape [2, 3, 4, 6], expected shape [2, 3, 4, 5]");
}

TEST_F(Validate, PackedSequences) {
  DeltaCase c = kCase;
  c.batch = 1;
  c.tokens = 9;
  const auto check = [&](std::vector<std::int64_t> ends, const char* argument, const char* says) {
    c.cu_seqlens = std::move(ends);
    DeltaData<float> packed(c);
    expect_error([&] { delta_forward(packed.forward()); }, argument, says);
  };
  check({1, 9}, "cu_seqlens[0]", "got 1, expected 0");
  check({0, 5, 4, 9}, "cu_seqlens[2]", "got 4, expected at least cu_seqlens[1] = 5");
  check({0, 5, 8}, "cu_seqlens[2]", "got 8, expected T = 9");
  check({0, 5, 10}, "cu_seqlens[2]", "got 10, expected T = 9");
  c.batch = 2;
  check({0, 5, 9}, "batch size B", "got 2, expected 1 with cu_seqlens");
  forward([](auto& p) { p.shape.packed = 1; }, "batch size B", "got 2, expected 1 with cu_seqlens");
  const std::int64_t ends[] = {0, 3};
  forward([&](auto& p) { p.cu_seqlens = View<const std::int64_t, 1>::contiguous(ends, {2}); }, "cu_seqlens",
          "got a tensor, expected nothing");
}

TEST_F(Validate, AStepTakesOneToken) {
  const DeltaForward<float> f = data_.forward();
  DeltaStep<float> p{f.shape,
                     f.rule,
                     test::token_of(f.q, 0),
                     test::token_of(f.k, 0),
                     test::token_of(f.v, 0),
                     test::token_of(f.beta, 0),
                     test::token_of(f.g, 0),
                     f.final_state,
                     test::token_of(f.o, 0)};
  expect_error([&] { delta_step(p); }, "token count T", "got 3, expected 1");
  p.shape.tokens = 1;
  p.shape.packed = 2;
  expect_error([&] { delta_step(p); }, "packed sequence count N", "got 2, expected 0 for decode steps");
  p.shape.packed = 0;
  EXPECT_NO_THROW(validate(p));
  p.state.data = nullptr;
  expect_error([&] { delta_step(p); }, "state", "got nothing, expected a tensor of shape [2, 4, 5, 6]");

  DeltaSteps<float> steps;
  steps.shape = f.shape;
  for (const std::int64_t tokens : {0, 9}) {
    steps.shape.tokens = tokens;
    expect_error([&] { delta_steps(steps); }, "token count T", "got " + std::to_string(tokens) + ", expected 1 to 8");
  }
  steps.shape.tokens = 2;
  steps.shape.packed = 2;
  expect_error([&] { delta_steps(steps); }, "packed sequence count N", "got 2, expected 0 for decode steps");
}

TEST_F(Validate, SavedStatesAreThoseOfTheProblem) {
  forward([](auto& p) { p.saved.interval = 0; }, "interval of saved states", "got 0, expected 1 to");
  forward([](auto& p) { p.saved.interval = 2; }, "chunk_states", "expected shape [2, 2, 4, 5, 6]");
  backward([](auto& p) { p.chunk_states = {}; }, "chunk_states", "got nothing");
}

// The host must not read tensors of a GPU: here every address of one is invalid.
TEST_F(Validate, OfTensorsOnAGpuOnlyTheShapesAreRead) {
  DeltaCase c = kCase;
  c.batch = 1;
  c.tokens = 9;
  c.cu_seqlens = {0, 5, 9};
  DeltaData<float> packed(c);
  DeltaForward<float> p = packed.forward();
  p.cu_seqlens.data = reinterpret_cast<const std::int64_t*>(std::uintptr_t{64});
  EXPECT_NO_THROW(validate(p, {Device::Kind::cuda}));
  p.cu_seqlens.extent[0] = 4;
  expect_error([&] { validate(p, {Device::Kind::cuda}); }, "cu_seqlens", "got shape [4], expected shape [3]");
}

TEST_F(Validate, ImplementationsSayWhyTheyRefuse) {
  expect_error([&] { delta_forward(data_.forward(), {.implementation = "fast"}); }, "implementation",
               "got 'fast', expected one of auto, chunk, recurrent, ref, chunk_amx, chunk_simd");
  DeltaData<double> wide(kCase);
  expect_error([&] { delta_forward(wide.forward()); }, "implementation", "float64 inputs need ref");
  expect_error([&] { delta_forward(wide.forward()); }, "implementation",
               "ref: the float64 reference runs only when asked for by name");
  EXPECT_TRUE(delta_forward(wide.forward(), {.implementation = "ref"}).refusals.empty());
  DeltaData<float16> half(kCase);
  expect_error([&] { delta_forward(half.forward()); }, "implementation",
               "recurrent_simd: it takes float32 and bfloat16");
  EXPECT_TRUE(delta_forward(half.forward(), {.implementation = "ref"}).refusals.empty());
  expect_error([&] { delta_forward(data_.forward(), {.implementation = "recurrent_cuda"}); }, "implementation",
               "recurrent_cuda: it computes on a GPU, and the tensors are on the CPU");
  expect_error(
      [&] {
        delta_forward(data_.forward(), {.implementation = "recurrent_simd", .context = {{Device::Kind::cuda, 1}}});
      },
      "implementation", "recurrent_simd: it computes on the CPU, and the tensors are on cuda:1");
}

TEST_F(Validate, StatesAreSavedAsTheImplementationDoes) {
  DeltaForward<float> p = data_.forward();
  p.saved.interval = 2;
  p.chunk_states = {};
  EXPECT_EQ(choose_delta_forward(p).saved, SavedStates{}) << "no views, so nothing is refused";
  const std::array<std::int64_t, 5> extent{2, 2, 4, 5, 6};
  std::vector<float> memory(2 * 2 * 4 * 5 * 6);
  p.chunk_states = View<float, 5>::contiguous(memory.data(), extent);
  expect_error([&] { delta_forward(p, {.implementation = "chunk_simd"}); }, "implementation",
               "it saves a state per 32 tokens, and the problem has a state per 2 tokens");
  EXPECT_NO_THROW(delta_forward(p, {.implementation = "ref"}));
}

TEST_F(Validate, TheRowThatRanIsReturned) {
  for (const auto& row : delta_forward_implementations()) {
    for (const std::string_view name : {row.name, row.algorithm}) {
      try {
        const Choice choice = delta_forward(data_.forward(), {.implementation = name});
        EXPECT_EQ(choice.algorithm, row.algorithm) << name;
        EXPECT_TRUE(name == row.algorithm || choice.implementation == row.name) << choice.implementation;
        EXPECT_EQ(choice.device, Device::Kind::cpu);
      } catch (const Error& error) {
        EXPECT_TRUE(row.name == "chunk_amx" || row.device == Device::Kind::cuda) << error.what();
      }
    }
  }
  const Choice choice = delta_forward(data_.forward());
  EXPECT_EQ(choice.implementation, "recurrent_simd");
  ASSERT_EQ(choice.refusals.size(), 2U);
  EXPECT_EQ(choice.refusals[1].implementation, "chunk_simd");
  EXPECT_EQ(choice.refusals[1].reason, "recurrent is faster for keys of 5 dimensions and 3 tokens");
  EXPECT_EQ(delta_backward(data_.backward()).implementation, "chunk_simd");
}

// On a CPU the reference is the only row of the recurrence's gradients.
TEST_F(Validate, TheReferenceComputesGradientsOfKeysOfOneOrTwoDimensions) {
  EXPECT_EQ(delta_backward(data_.backward(), {.implementation = "recurrent"}).implementation, "ref");
  for (const std::int64_t keys : {1, 2, 3}) {
    DeltaCase c = kCase;
    c.key_dim = keys;
    DeltaData<float> data(c);
    delta_forward(data.forward());
    EXPECT_EQ(delta_backward(data.backward()).implementation, keys <= 2 ? "ref" : "chunk_simd") << keys;
    DeltaData<double> wide(c);
    expect_error([&] { delta_backward(wide.backward()); }, "implementation",
                 "ref: the float64 reference runs only when asked for by name");
  }
}

TEST(NearestName, IsTheOneWithTheFewestEdits) {
  EXPECT_EQ(nearest_name("deltanett", {"efla", "deltanet", "softmax"}), "deltanet");
  EXPECT_EQ(nearest_name("", {"longhorn", "efla"}), "efla");
  EXPECT_EQ(nearest_name("efal", {"euler", "efla"}), "efla");
  EXPECT_EQ(nearest_name("x", {}), "");
}

TEST(SetThreads, TakesOneToAThousandAndTwentyFour) {
  expect_error([] { set_threads(0); }, "threads", "got 0, expected 1 to 1024");
  expect_error([] { set_threads(1025); }, "threads", "got 1025");
  set_threads(3);
  EXPECT_EQ(default_pool().threads(), 3);
  EXPECT_EQ(default_pool(7).threads(), 3) << "the number of set_threads goes before the caller's";
  ThreadPool* const before = &default_pool();
  set_threads(2);
  EXPECT_EQ(default_pool().threads(), 2);
  set_threads(3);
  EXPECT_EQ(&default_pool(), before) << "a pool may be in use and stays";
}

TEST(UseTarget, NamesTheTargetsThereAre) {
  expect_error([] { cpu::use_target("MMX"); }, "name", "got 'MMX', expected " + cpu::supported_targets().front());
  for (const std::string& target : cpu::supported_targets()) {
    const test::OnTarget guard(target);
    EXPECT_EQ(cpu::target_name(), target);
  }
  EXPECT_EQ(cpu::target_name(), cpu::supported_targets().front());
}

}  // namespace
}  // namespace efla
