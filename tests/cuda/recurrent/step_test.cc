// Decode steps on the GPU against the float64 recurrence, over the CPU's test matrix, token after token and several
// tokens per call.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "efla/ref/delta.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"
#include "tests/support/delta_cases.h"
#include "tests/support/delta_results.h"
#include "tests/support/plain_delta.h"
#include "tests/support/reach.h"

namespace efla::test {
namespace {

constexpr std::int64_t kPoolStates = 3;  // beside those of the batch entries

// What several calls leave in the outputs and in the pool.
template <class T, class S>
struct Decoded {
  std::vector<double> o;
  Tensor<S, 4> states;
};

template <class T, int Rank>
View<T, Rank> tokens_of(View<T, Rank> view, std::int64_t t, std::int64_t count) {
  if (!view) return view;
  view.data = view.at(std::int64_t{0}, t);
  view.extent[1] = count;
  return view;
}

// Entry b has slot B − 1 − b + kPoolStates.
std::vector<std::int64_t> slots_of(std::int64_t batch) {
  std::vector<std::int64_t> slots(batch);
  for (std::int64_t b = 0; b < batch; ++b) slots[b] = batch - 1 - b + kPoolStates;
  return slots;
}

template <class S>
std::vector<double> state_values(Tensor<S, 4>& states, std::int64_t batch) {
  const View<S, 4> pool = states.view();
  std::vector<double> values;
  for (const std::int64_t slot : slots_of(batch)) {
    for (std::int64_t h = 0; h < pool.extent[1]; ++h) {
      for (std::int64_t i = 0; i < pool.extent[2]; ++i) {
        for (std::int64_t j = 0; j < pool.extent[3]; ++j) values.push_back(to_float(pool(slot, h, i, j)));
      }
    }
  }
  return values;
}

// Decodes all tokens of a case's data, `per_call` in each call (0: one, two, … eight and again); `skip`: an entry
// without a state.
template <class T, class S>
Decoded<T, S> decode(const DeltaCase& c, DeltaData<T>& data, std::int64_t per_call, std::int64_t skip = -1) {
  Decoded<T, S> result{{},
                       Tensor<S, 4>({c.batch + kPoolStates, data.shape.value_heads, c.key_dim, c.value_dim}, c.layout)};
  std::vector<std::int64_t> slots = slots_of(c.batch);
  const View<S, 4> pool = result.states.view();
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < pool.extent[1]; ++h) {
      for (std::int64_t i = 0; i < pool.extent[2]; ++i) {
        for (std::int64_t j = 0; j < pool.extent[3]; ++j) {
          const float x = data.initial_state.view() ? data.initial_state.view()(b, h, i, j) : 0.0F;
          pool(slots[b], h, i, j) = from_state<S>(x);
        }
      }
    }
  }
  if (skip >= 0) slots[skip] = -1;
  const DeviceData<T> device(data);
  const DeviceTensor<S, 4> device_pool(result.states);
  const DeviceBytes device_slots(slots.size() * sizeof(std::int64_t));
  gpu::check(cudaMemcpy(device_slots.data(), slots.data(), device_slots.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  const DeltaForward<T> all = device.forward();
  std::int64_t call = 0;
  for (std::int64_t t = 0; t < c.tokens; ++call) {
    const std::int64_t count = std::min(c.tokens - t, per_call > 0 ? per_call : call % kMaxStepTokens + 1);
    DeltaSteps<T, S> p;
    p.shape = all.shape;
    p.shape.tokens = count;
    p.rule = all.rule;
    p.q = tokens_of(all.q, t, count);
    p.k = tokens_of(all.k, t, count);
    p.v = tokens_of(all.v, t, count);
    p.beta = tokens_of(all.beta, t, count);
    p.g = tokens_of(all.g, t, count);
    p.slots = View<const std::int64_t, 1>::contiguous(static_cast<const std::int64_t*>(device_slots.data()),
                                                      {static_cast<std::int64_t>(slots.size())});
    p.states = device_pool.view();
    p.o = tokens_of(all.o, t, count);
    p.erase_key = tokens_of(all.erase_key, t, count);
    gpu::step_fwd(p, nullptr);
    t += count;
  }
  device.download();
  device_pool.download();
  EXPECT_TRUE(data.sentinels_intact() && result.states.sentinels_intact());
  result.o = data.o.values();
  return result;
}

template <class T, class S>
Decoded<T, S> decode(const DeltaCase& c, std::int64_t per_call, std::int64_t skip = -1) {
  DeltaData<T> data(c);
  return decode<T, S>(c, data, per_call, skip);
}

class CudaStep : public testing::TestWithParam<DeltaCase> {
 protected:
  template <class T, class S>
  void run(const Tolerance& tolerance) {
    const DeltaCase& c = GetParam();
    DeltaCase with_final = c;
    with_final.final_state = true;
    DeltaData<T> data(with_final), naive(with_final);
    DeltaData<double> exact(with_final, data);
    ref::recurrent_fwd(exact.forward());
    naive_steps<T, S>(naive);
    Decoded<T, S> together = decode<T, S>(c, 0), single = decode<T, S>(c, 1);
    EXPECT_EQ(together.o, single.o);
    EXPECT_TRUE(together.states.same_bits(single.states));
    EXPECT_EQ(disagreement(together.o, exact.o.values(), naive.o.values(), tolerance), "");
    EXPECT_EQ(disagreement(state_values(together.states, c.batch), exact.final_state.values(),
                           naive.final_state.values(), tolerance),
              "");
  }

 private:
  // The naive recurrence, whose state passes through S after every token.
  template <class T, class S>
  static void naive_steps(DeltaData<T>& data) {
    if constexpr (sizeof(S) == sizeof(float)) return plain_forward(data.forward());
    const DeltaForward<T> all = data.forward();
    Tensor<S, 4> states(all.final_state.extent);
    states.assign(data.initial_state.view() ? data.initial_state.values()
                                            : std::vector<double>(all.final_state.size()));
    const auto without_tokens = [](const auto& view, std::int64_t t) {
      using V = std::remove_cvref_t<decltype(view)>;
      constexpr int kRank = std::tuple_size_v<decltype(V::extent)>;
      View<std::remove_pointer_t<decltype(V::data)>, kRank - 1> token;
      if (!view) return token;
      token.data = view.at(std::int64_t{0}, t);
      for (int d = 0, from = 0; from < kRank; ++from) {
        if (from == 1) continue;
        token.extent[d] = view.extent[from];
        token.stride[d++] = view.stride[from];
      }
      return token;
    };
    for (std::int64_t t = 0; t < data.shape.tokens; ++t) {
      DeltaStep<T, S> p;
      p.shape = data.shape;
      p.shape.tokens = 1;
      p.rule = data.rule;
      p.q = without_tokens(all.q, t);
      p.k = without_tokens(all.k, t);
      p.v = without_tokens(all.v, t);
      p.beta = without_tokens(all.beta, t);
      p.g = without_tokens(all.g, t);
      p.state = states.view();
      p.o = without_tokens(all.o, t);
      p.erase_key = without_tokens(all.erase_key, t);
      ref::step(p);
    }
    data.final_state.assign(states.values());
  }
};

TEST_P(CudaStep, Float32) { run<float, float>(tolerance_of("float32")); }
TEST_P(CudaStep, Bfloat16) { run<bfloat16, float>(tolerance_of("bfloat16")); }
TEST_P(CudaStep, Float16) {
  if (!float16_holds(GetParam())) GTEST_SKIP() << "results are beyond float16's range";
  run<float16, float>(tolerance_of("float16"));
}
TEST_P(CudaStep, Float32NarrowState) { run<float, bfloat16>(tolerance_of("bfloat16 states")); }
TEST_P(CudaStep, Bfloat16NarrowState) { run<bfloat16, bfloat16>(tolerance_of("bfloat16 states")); }
TEST_P(CudaStep, Float16NarrowState) {
  if (!float16_holds(GetParam())) GTEST_SKIP() << "results are beyond float16's range";
  run<float16, bfloat16>(tolerance_of("bfloat16 states"));
}

std::vector<DeltaCase> step_cases() {
  std::vector<DeltaCase> cases;
  for (const auto& family : {delta_cases(), two_key_cases_on_gpus()}) {
    for (DeltaCase c : family) {
      if (!c.cu_seqlens.empty()) continue;
      c.tokens = std::min<std::int64_t>(c.tokens, 40);
      cases.push_back(c);
    }
  }
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
      for (const EraseKey erase_key : {EraseKey::none, EraseKey::gated}) {
        DeltaCase c{"exact", 1, 1, true, 3, 36, 2, dim, dim, 1, Layout::contiguous, true, true, false};
        c.decay = decay;
        c.gate = 0.5;
        c.group = 2;
        c.erase_key = erase_key;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Matrix, CudaStep, testing::ValuesIn(step_cases()),
                         [](const auto& info) { return std::to_string(info.index) + "_" + name_of(info.param); });

// An entry without a slot has zeros for outputs, and nothing else changes.
TEST(CudaStepPool, SkippedEntry) {
  const DeltaCase c{"exact", 1, 1, true, 4, 3, 2, 128, 128, 1, Layout::contiguous, true, true, false};
  constexpr std::int64_t kSkipped = 2;
  Decoded<bfloat16, float> all = decode<bfloat16, float>(c, 3), some = decode<bfloat16, float>(c, 3, kSkipped);
  const std::int64_t row = c.tokens * c.heads * c.value_dim;
  for (std::int64_t i = 0; i < std::ssize(all.o); ++i) {
    ASSERT_EQ(some.o[i], i / row == kSkipped ? 0.0 : all.o[i]) << i;
  }
  DeltaData<bfloat16> data(c);
  const std::vector<double> got = state_values(some.states, c.batch), expected = state_values(all.states, c.batch),
                            initial = data.initial_state.values();
  const std::int64_t size = c.heads * c.key_dim * c.value_dim;
  for (std::int64_t i = 0; i < std::ssize(got); ++i) {
    ASSERT_EQ(got[i], i / size == kSkipped ? initial[i] : expected[i]) << i;
  }
}

// A state keeps the first tokens to the same bits, as if there had been no others; all outputs are computed.
template <class T, class S>
void expect_kept(std::int64_t dim, EraseKey erase_key) {
  constexpr std::int64_t kTokens = 5;
  // Of each entry, and what values outside 0 to T count as; the third entry has no state.
  const std::vector<std::int64_t> given{3, -1, 4, kTokens + 1, 1}, kept{3, 0, 0, kTokens, 1}, slots{4, 0, -1, 1, 2};
  const auto batch = std::ssize(kept);
  DeltaCase c{"exact", 1, 1, true, batch, kTokens, 2, dim, dim, 1, Layout::contiguous, true, true, false};
  c.decay = Decay::scalar;
  c.gate = 0.5;
  c.erase_key = erase_key;
  DeltaData<T> data(c);
  Tensor<S, 4> states({batch, c.heads, dim, dim});
  const std::vector<double> initial = data.initial_state.values();
  const DeviceBytes numbers(2 * batch * sizeof(std::int64_t));
  auto* const on_device = static_cast<std::int64_t*>(numbers.data());
  const auto upload = [&](const std::vector<std::int64_t>& from, std::int64_t* to) {
    gpu::check(cudaMemcpy(to, from.data(), batch * sizeof(std::int64_t), cudaMemcpyHostToDevice), "cudaMemcpy");
    return View<const std::int64_t, 1>::contiguous(to, {batch});
  };
  // Returns outputs and states after one call of the first `count` tokens.
  const auto call = [&](std::int64_t count, bool rolls_back) {
    states.assign(initial);
    const DeviceData<T> device(data);
    const DeviceTensor<S, 4> device_states(states);
    const DeltaForward<T> f = device.forward();
    DeltaSteps<T, S> p{f.shape, f.rule, f.q, f.k, f.v, f.beta, f.g, upload(slots, on_device), device_states.view(),
                       f.o};
    p.erase_key = f.erase_key;
    p.shape.tokens = count;
    if (rolls_back) p.kept = upload(given, on_device + batch);
    gpu::step_fwd(p, nullptr);
    device.download();
    device_states.download();
    return std::pair(data.o.values(), states.values());
  };
  const auto rolled_back = call(kTokens, true);
  EXPECT_EQ(rolled_back.first, call(kTokens, false).first);
  states.assign(initial);
  const std::vector<double> untouched = states.values();
  const std::int64_t size = c.heads * dim * dim;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t slot = slots[b] < 0 ? 3 : slots[b];  // which no entry has
    const std::vector<double> expected = kept[b] > 0 ? call(kept[b], false).second : untouched;
    for (std::int64_t i = slot * size; i < (slot + 1) * size; ++i) {
      ASSERT_EQ(rolled_back.second[i], expected[i]) << b << ' ' << i;
    }
  }
}

TEST(CudaStepPool, RollsBackTokensThatAreNotKept) {
  for (const std::int64_t dim : {64, 101, 128, 256}) {  // of float32 states 64 and 128 in registers, 101 by elements
    for (const EraseKey erase_key : {EraseKey::none, EraseKey::free}) {
      expect_kept<float, float>(dim, erase_key);
      expect_kept<bfloat16, bfloat16>(dim, erase_key);
    }
  }
}

// A NaN token reaches what it reaches in the recurrence, whichever call has the token, and no other state of the pool.
template <class T, class S>
void expect_contained_steps(Decay decay) {
  DeltaCase c{"exact", 1, 1, true, 3, 12, 2, 128, 64, 1, Layout::contiguous, true, true, false};
  c.decay = decay;
  c.gate = 0.5;
  c.group = 2;
  expect_contained<T>(c, 1, {{1, 0}, {1, 4}, {1, 11}}, [&](DeltaData<T>& data) {
    Decoded<T, S> decoded = decode<T, S>(c, data, 0);
    return Results{{"o", decoded.o}, {"final_state", state_values(decoded.states, c.batch)}};
  });
}

TEST(CudaStepPool, NanToken) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    expect_contained_steps<float, float>(decay);
    expect_contained_steps<bfloat16, bfloat16>(decay);
  }
}

// A graph replays a call: every replay is a step.
TEST(CudaStepPool, StepsInAGraph) {
  const DeltaCase c{"exact", 1, 1, true, 3, 1, 2, 128, 64, 1, Layout::contiguous, true, true, false};
  DeltaData<float> data(c);
  const DeviceData<float> device(data);
  Tensor<float, 4> replayed({c.batch, c.heads, c.key_dim, c.value_dim}), called(replayed);
  for (auto* states : {&replayed, &called}) states->assign(data.initial_state.values());
  const DeviceTensor<float, 4> device_replayed(replayed), device_called(called);
  const auto step = [&](const DeviceTensor<float, 4>& states, cudaStream_t stream) {
    const DeltaForward<float> f = device.forward();
    gpu::step_fwd(DeltaSteps<float>{f.shape, f.rule, f.q, f.k, f.v, f.beta, f.g, {}, states.view(), f.o}, stream);
  };
  replay_in_graph([&](cudaStream_t stream) { step(device_replayed, stream); });
  for (int i = 0; i < 2; ++i) step(device_called, nullptr);
  device_replayed.download();
  device_called.download();
  EXPECT_TRUE(replayed.same_bits(called));
}

// More batch entries than a grid has rows in its second dimension.
TEST(CudaStepPool, ManyEntries) {
  const DeltaCase c{"exact", 1, 1, true, 70'000, 1, 1, 16, 8, 1, Layout::contiguous, true, true, false};
  DeltaData<float> data(c), plain(c);
  DeltaData<double> exact(c, data);
  ref::recurrent_fwd(exact.forward());
  plain_forward(plain.forward());
  EXPECT_EQ(disagreement(decode<float, float>(c, 1).o, exact.o.values(), plain.o.values(), tolerance_of("float32")),
            "");
}

}  // namespace
}  // namespace efla::test
