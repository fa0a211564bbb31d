// What the algorithms of the operator have in common, whatever the problem: they agree with each other, with themselves
// on parts of a sequence, and bit for bit with any number of threads; and no output knows of later tokens.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "efla/cpu/common/target.h"
#include "tests/support/compare.h"
#include "tests/support/delta_run.h"

namespace efla::test {
namespace {

// Runs `check` on every SIMD target, for a problem with keys of 40 dimensions, one with 64, which AMX takes, and one
// with two keys.
void on_every_target(const std::function<void(const DeltaCase&)>& check) {
  for (const std::string& target : cpu::supported_targets()) {
    for (const auto& [keys, erase_key] : {std::pair{40, EraseKey::none}, {64, EraseKey::none}, {40, EraseKey::gated}}) {
      DeltaCase c{"exact", 1, 1, false, 2, 100, 3, keys, 72, 2, Layout::sliced, true, true, true};
      c.erase_key = erase_key;
      SCOPED_TRACE(testing::Message() << target << ' ' << name_of(c));
      const OnTarget guard(target);
      check(c);
    }
  }
}

template <class T>
bool same_forward(const DeltaData<T>& a, const DeltaData<T>& b) {
  return a.o.same_bits(b.o) && a.final_state.same_bits(b.final_state) && a.chunk_states.same_bits(b.chunk_states);
}

template <class T>
bool same_backward(const DeltaData<T>& a, const DeltaData<T>& b) {
  return a.dq.same_bits(b.dq) && a.dk.same_bits(b.dk) && a.dv.same_bits(b.dv) && a.dbeta.same_bits(b.dbeta) &&
         a.derase_key.same_bits(b.derase_key) && a.dg.same_bits(b.dg) && a.dinitial_state.same_bits(b.dinitial_state);
}

TEST(DeltaForms, ChunkwiseEqualsRecurrent) {
  on_every_target([](const DeltaCase& a_case) {
    ThreadPool pool(1);
    DeltaData<float> chunk(a_case), recurrent(a_case);
    run_forward("chunk", chunk, pool);
    run_backward("chunk", chunk, pool);
    run_forward("recurrent", recurrent, pool);
    run_backward("recurrent", recurrent, pool);
    const auto check = [](const Results& a, const Results& b) {
      for (std::size_t i = 0; i < a.size(); ++i) {
        const double error = distance(a[i].second, b[i].second).rms;
        if (!(error <= 1e-6)) ADD_FAILURE() << a[i].first << ": relative RMS error " << error;
      }
    };
    check(forward_results(chunk), forward_results(recurrent));
    check(backward_results(chunk), backward_results(recurrent));
    EXPECT_LE(distance(chunk.chunk_states.values(), recurrent.chunk_states.values()).rms, 1e-6);
  });
}

template <class T>
void check_threads(const DeltaCase& c) {
  for (const std::string implementation : {"chunk", "recurrent", "step"}) {
    SCOPED_TRACE(testing::Message() << implementation << ' ' << DTypeOf<T>::name << ' ' << name_of(c));
    DeltaData<T> expected(c);
    ThreadPool one(1);
    run_forward(implementation, expected, one);
    if (implementation == "chunk") run_backward(implementation, expected, one);
    for (const int threads : {1, 2, 3, 5}) {
      ThreadPool pool(threads);
      DeltaData<T> again(c);
      run_forward(implementation, again, pool);
      EXPECT_TRUE(same_forward(again, expected)) << threads << " threads";
      if (implementation != "chunk") continue;
      run_backward(implementation, again, pool);
      EXPECT_TRUE(same_backward(again, expected)) << threads << " threads";
    }
  }
}

TEST(DeltaForms, BitsDoNotDependOnTheThreads) {
  on_every_target([](const DeltaCase& a_case) {
    for (const auto& [batch, heads, value_dim] :
         {std::array{1, 1, 200}, {1, 1, 7}, {1, 2, 65}, {2, 3, 64}, {3, 4, 33}}) {
      DeltaCase c = a_case;
      c.batch = batch;
      c.heads = heads;
      c.value_dim = value_dim;
      c.tokens = 45;
      check_threads<float>(c);
      check_threads<bfloat16>(c);
    }
    // A decode step large enough to be distributed, at columns within heads: three runs of four heads of three slices.
    DeltaCase large = a_case;
    large.batch = 1;
    large.heads = 4;
    large.key_dim = 200;
    large.value_dim = 300;
    large.tokens = 2;
    check_threads<float>(large);
    check_threads<bfloat16>(large);
    // Value heads of one query head: as many as threads and more, fewer, and query heads that do not come out even.
    for (const auto& [heads, group] : {std::array{1, 5}, {1, 2}, {3, 3}}) {
      for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
        DeltaCase c = a_case;
        c.batch = 1;
        c.heads = heads;
        c.group = group;
        c.decay = decay;
        c.qk_l2norm = group == 3;
        c.tokens = 45;
        check_threads<float>(c);
        check_threads<bfloat16>(c);
      }
    }
  });
}

// Tokens [start, start + count) of a view over [B, T, …], or no view.
template <class T, int Rank>
View<T, Rank> tokens_of(View<T, Rank> view, std::int64_t start, std::int64_t count) {
  if (!view) return view;
  view.data = view.at(std::int64_t{0}, start);
  view.extent[1] = count;
  return view;
}

// The forward of `data` in two parts, and then its backward in two parts, states carried between them.
template <class T>
void run_split(const std::string& implementation, DeltaData<T>& data, std::int64_t at) {
  ThreadPool pool(1);
  const RunOptions options{implementation, {.pool = &pool}};
  const std::int64_t total = data.shape.tokens;
  const std::array<std::int64_t, 4> states{data.shape.batch, data.shape.heads, data.shape.key_dim,
                                           data.shape.value_dim};
  Tensor<State<T>, 4> state(states), dstate(states);
  Tensor<State<T>, 5> saved[2];
  const auto bounds = [&](int part) { return part == 0 ? std::pair(std::int64_t{0}, at) : std::pair(at, total - at); };
  for (const int part : {0, 1}) {
    const auto [start, count] = bounds(part);
    DeltaForward<T> p = data.forward();
    p.shape.tokens = count;
    saved[part] = Tensor<State<T>, 5>({states[0], p.shape.chunks(), states[1], states[2], states[3]});
    p.q = tokens_of(p.q, start, count);
    p.k = tokens_of(p.k, start, count);
    p.v = tokens_of(p.v, start, count);
    p.beta = tokens_of(p.beta, start, count);
    p.erase_key = tokens_of(p.erase_key, start, count);
    p.o = tokens_of(p.o, start, count);
    p.chunk_states = saved[part].view();
    if (part == 0) p.final_state = state.view();
    if (part == 1) p.initial_state = state.view();
    delta_forward(p, options);
  }
  for (const int part : {1, 0}) {
    const auto [start, count] = bounds(part);
    DeltaBackward<T> p = data.backward();
    p.shape.tokens = count;
    p.q = tokens_of(p.q, start, count);
    p.k = tokens_of(p.k, start, count);
    p.v = tokens_of(p.v, start, count);
    p.beta = tokens_of(p.beta, start, count);
    p.erase_key = tokens_of(p.erase_key, start, count);
    p.dout = tokens_of(p.dout, start, count);
    p.derase_key = tokens_of(p.derase_key, start, count);
    p.dq = tokens_of(p.dq, start, count);
    p.dk = tokens_of(p.dk, start, count);
    p.dv = tokens_of(p.dv, start, count);
    p.dbeta = tokens_of(p.dbeta, start, count);
    p.chunk_states = saved[part].view();
    if (part == 1) p.dinitial_state = dstate.view();
    if (part == 0) p.dfinal_state = dstate.view();
    delta_backward(p, options);
  }
}

template <class T>
void check_split(const DeltaCase& a_case, const std::string& implementation, std::int64_t at, bool to_the_bit) {
  SCOPED_TRACE(testing::Message() << implementation << ' ' << DTypeOf<T>::name << " split at " << at);
  ThreadPool pool(1);
  DeltaData<T> whole(a_case), parts(a_case);
  run_forward(implementation, whole, pool);
  run_backward(implementation, whole, pool);
  run_split(implementation, parts, at);
  EXPECT_TRUE(parts.sentinels_intact());
  if (to_the_bit) {
    EXPECT_TRUE(parts.o.same_bits(whole.o) && parts.final_state.same_bits(whole.final_state));
    // The backward of the recurrence is the reference, in float64 but for the state's gradient between the parts.
    if (implementation == "chunk") {
      EXPECT_TRUE(same_backward(parts, whole));
    }
    if (implementation == "chunk" || sizeof(T) == sizeof(bfloat16)) return;
  }
  const auto check = [](const Results& got, const Results& expected) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double error = distance(got[i].second, expected[i].second).rms;
      if (!(error <= 1e-6)) ADD_FAILURE() << got[i].first << ": relative RMS error " << error;
    }
  };
  check(forward_results(parts), forward_results(whole));
  check(backward_results(parts), backward_results(whole));
}

TEST(DeltaForms, ASequenceInTwoPartsEqualsTheWhole) {
  on_every_target([](const DeltaCase& a_case) {
    for (const std::string implementation : {"chunk", "recurrent"}) {
      check_split<float>(a_case, implementation, 2 * kChunk, true);
      check_split<bfloat16>(a_case, implementation, kChunk, true);
      for (const std::int64_t at : {1, 45, 99}) check_split<float>(a_case, implementation, at, false);
    }
  });
}

// Replaces what the tokens from `start` on bring.
template <class T>
void replace_later_tokens(DeltaData<T>& data, std::int64_t start, const std::function<double()>& draw) {
  const auto replace = [&](auto& tensor) {
    std::vector<double> values = tensor.values();
    const auto per_token = values.size() / static_cast<std::size_t>(data.shape.batch * data.shape.tokens);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (static_cast<std::int64_t>(i / per_token) % data.shape.tokens >= start) values[i] = draw();
    }
    tensor.assign(values);
  };
  for (auto* tensor : {&data.q, &data.k, &data.v, &data.dout, &data.erase_key}) replace(*tensor);
  replace(data.beta);
}

// The values of a [B, T, …] tensor at tokens before `end`.
template <class Tensor>
std::vector<double> before(const Tensor& tensor, const DeltaShape& shape, std::int64_t end) {
  std::vector<double> kept;
  const std::vector<double> values = tensor.values();
  const auto per_token = values.size() / static_cast<std::size_t>(shape.batch * shape.tokens);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (static_cast<std::int64_t>(i / per_token) % shape.tokens < end) kept.push_back(values[i]);
  }
  return kept;
}

template <class T>
void check_causality(const DeltaCase& a_case, const std::string& implementation, std::int64_t end) {
  SCOPED_TRACE(testing::Message() << implementation << ' ' << DTypeOf<T>::name << " before " << end);
  ThreadPool pool(1);
  DeltaData<T> data(a_case), other(a_case), unknown(a_case);
  run_forward(implementation, data, pool);
  Random random(29);
  replace_later_tokens(other, end, [&] { return random.normal(); });
  run_forward(implementation, other, pool);
  EXPECT_EQ(before(other.o, a_case.shape(), end), before(data.o, a_case.shape(), end));
  replace_later_tokens(unknown, end, [] { return std::numeric_limits<double>::quiet_NaN(); });
  run_forward(implementation, unknown, pool);
  EXPECT_EQ(before(unknown.o, a_case.shape(), end), before(data.o, a_case.shape(), end));
  if (implementation != "chunk") return;
  run_backward(implementation, data, pool);
  run_backward(implementation, other, pool);
  EXPECT_EQ(before(other.dq, a_case.shape(), end), before(data.dq, a_case.shape(), end));
}

TEST(DeltaForms, OutputsDoNotKnowLaterTokens) {
  on_every_target([](const DeltaCase& a_case) {
    for (const std::string implementation : {"chunk", "recurrent", "step"}) {
      for (const std::int64_t end : {1, 13, 32, 45, 99}) {
        check_causality<float>(a_case, implementation, end);
        check_causality<bfloat16>(a_case, implementation, end);
      }
    }
  });
}

// The same for gates. With AMX the decays of a chunk choose how its products are made, so there to rounding.
TEST(DeltaForms, OutputsDoNotKnowLaterGates) {
  on_every_target([](const DeltaCase& a_case) {
    ThreadPool pool(1);
    const double tolerance = cpu::uses_amx() ? 1e-6 : 0.0;
    for (const Decay decay : {Decay::scalar, Decay::channel}) {
      for (const std::string implementation : {"chunk", "recurrent", "step"}) {
        for (const double strength : {0.01, 1.0, 5.0, std::numeric_limits<double>::quiet_NaN()}) {
          SCOPED_TRACE(testing::Message() << implementation << ' ' << strength);
          DeltaCase c = a_case;
          c.decay = decay;
          DeltaData<float> data(c), other(c);
          constexpr std::int64_t kEnd = 45;
          Random random(31);
          replace_later_tokens(other, kEnd, [&] { return random.normal(); });
          std::vector<double> g = other.g.values();
          const auto per_token = g.size() / static_cast<std::size_t>(c.batch * c.tokens);
          for (std::size_t i = 0; i < g.size(); ++i) {
            if (static_cast<std::int64_t>(i / per_token) % c.tokens >= kEnd) g[i] = -strength;
          }
          other.g.assign(g);
          run_forward(implementation, data, pool);
          run_forward(implementation, other, pool);
          const std::vector<double> known = before(data.o, c.shape(), kEnd), again = before(other.o, c.shape(), kEnd);
          if (tolerance == 0.0) {
            EXPECT_EQ(again, known);
          } else {
            EXPECT_LE(distance(again, known).rms, tolerance);
          }
        }
      }
    }
  });
}

TEST(DeltaForms, AGateThatIsNotANumberReachesTheOutputs) {
  on_every_target([](const DeltaCase& a_case) {
    ThreadPool pool(1);
    for (const Decay decay : {Decay::scalar, Decay::channel}) {
      for (const std::string implementation : {"ref", "chunk", "recurrent", "step"}) {
        SCOPED_TRACE(implementation);
        DeltaCase c = a_case;
        c.decay = decay;
        DeltaData<float> data(c);
        std::vector<double> g = data.g.values();
        const auto per_token = g.size() / static_cast<std::size_t>(c.batch * c.tokens);
        constexpr std::size_t kToken = 40;
        for (std::size_t i = kToken * per_token; i < (kToken + 1) * per_token; i += 5) {
          g[i] = std::numeric_limits<double>::quiet_NaN();
        }
        data.g.assign(g);
        run_forward(implementation, data, pool);
        for (const std::int64_t t : {std::int64_t{0}, std::int64_t{39}}) {
          EXPECT_FALSE(std::isnan(data.o.view()(0, t, 0, 0))) << t;
        }
        for (const std::int64_t t : {std::int64_t{40}, std::int64_t{41}, c.tokens - 1}) {
          EXPECT_TRUE(std::isnan(data.o.view()(0, t, 0, 0))) << t;
        }
      }
    }
  });
}

// Rounding to bfloat16 must not carry a NaN's bits away.
TEST(DeltaForms, ANaNOfAnyBitsInTheStateReachesTheOutputs) {
  on_every_target([](const DeltaCase& a_case) {
    ThreadPool pool(1);
    for (const std::string implementation : {"chunk", "recurrent"}) {
      for (const std::uint32_t bits : {0x7fc00000U, 0x7fffffffU, 0xffffffffU}) {
        DeltaData<bfloat16> data(a_case);
        DeltaForward<bfloat16> p = data.forward();
        Tensor<float, 4> state({a_case.batch, a_case.heads, a_case.key_dim, a_case.value_dim});
        state.assign(std::vector<double>(static_cast<std::size_t>(state.view().size())));
        state.view()(0, 0, 5, 3) = std::bit_cast<float>(bits);
        p.initial_state = state.view();
        delta_forward(p, {implementation, {.pool = &pool}});
        EXPECT_TRUE(std::isnan(to_float(p.o(0, 0, 0, 3)))) << implementation << ' ' << bits;
        EXPECT_FALSE(std::isnan(to_float(p.o(0, 0, 0, 4)))) << implementation << ' ' << bits;
      }
    }
  });
}

// States of more than 8 MB are written past the caches where they are aligned, and otherwise as few are.
TEST(DeltaForms, ManySavedStatesAreThoseThatAreWrittenOneByOne) {
  on_every_target([](const DeltaCase& a_case) {
    DeltaCase c = a_case;
    c.batch = 1;
    c.heads = 4;
    c.value_dim = 64;
    c.tokens = 9000 * 64 / a_case.key_dim;
    c.layout = Layout::contiguous;
    DeltaData<float> data(c);
    ThreadPool pool(2);
    for (const std::string implementation : {"chunk", "recurrent"}) {
      DeltaForward<float> p = data.forward();
      std::vector<float> memory(static_cast<std::size_t>(p.chunk_states.size()) + 32);
      void* start = memory.data();
      std::size_t space = memory.size() * sizeof(float);
      float* const aligned = static_cast<float*>(std::align(64, 64, start, space));
      ASSERT_GE(p.chunk_states.size() * std::int64_t{sizeof(float)}, 8 << 20);
      std::vector<std::vector<float>> saved;
      for (const std::ptrdiff_t offset : {0, 1}) {
        p.chunk_states.data = aligned + offset;
        delta_forward(p, {implementation, {.pool = &pool}});
        saved.emplace_back(p.chunk_states.data, p.chunk_states.data + p.chunk_states.size());
      }
      EXPECT_EQ(saved[0], saved[1]) << implementation;
    }
  });
}

TEST(DeltaForms, LeavingOutputsOutChangesNothingElse) {
  on_every_target([](const DeltaCase& a_case) {
    ThreadPool pool(1);
    for (const std::string implementation : {"chunk", "recurrent"}) {
      DeltaData<float> data(a_case), alone(a_case), dalone(a_case);
      run_forward(implementation, data, pool);
      run_backward(implementation, data, pool);
      DeltaForward<float> forward = alone.forward();
      forward.final_state = {};
      forward.chunk_states = {};
      delta_forward(forward, {implementation, {.pool = &pool}});
      EXPECT_TRUE(alone.o.same_bits(data.o)) << implementation;
      DeltaBackward<float> backward = dalone.backward();
      backward.chunk_states = data.chunk_states.view();
      backward.dinitial_state = {};
      delta_backward(backward, {implementation, {.pool = &pool}});
      dalone.dinitial_state = data.dinitial_state;
      EXPECT_TRUE(same_backward(dalone, data)) << implementation;
    }
  });
}

// A step writes the very state that it reads; token after token it gives what the forward gives.
TEST(DeltaForms, StepsEqualTheForward) {
  on_every_target([](const DeltaCase& a_case) {
    ThreadPool pool(2);
    DeltaData<float> steps(a_case), forward(a_case);
    run_forward("step", steps, pool);
    run_forward("recurrent", forward, pool);
    EXPECT_LE(distance(steps.o.values(), forward.o.values()).rms, 1e-6);
    EXPECT_LE(distance(steps.final_state.values(), forward.final_state.values()).rms, 1e-6);
  });
}

}  // namespace
}  // namespace efla::test
