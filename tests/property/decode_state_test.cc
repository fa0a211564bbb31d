// A decode state returns to the bits it had, wherever in its memory, and says when it cannot.
#include "efla/ops/decode_state.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"

namespace efla::test {
namespace {

template <class S>
std::vector<float> values_of(const View<const S, 4>& states) {
  std::vector<float> all;
  for (std::int64_t i = 0; i < states.size(); ++i) all.push_back(to_float(states.data[i]));
  return all;
}

template <class T, class S>
struct Decoding {
  DeltaCase c;
  DeltaData<T> data;
  DecodeState<T, S> state;

  Decoding(const DeltaCase& given, std::int64_t memory)
      : c(given), data(given), state(one(given), given.rule(), memory) {}

  static DeltaShape one(const DeltaCase& c) {
    DeltaShape shape = c.shape();
    shape.tokens = 1;
    return shape;
  }
  void step(std::int64_t t) {
    const auto f = data.forward();
    state.step(token_of(f.q, t), token_of(f.k, t), token_of(f.v, t), token_of(f.beta, t), token_of(f.g, t),
               token_of(f.o, t));
  }
};

template <class T, class S>
void check(Decay decay, std::int64_t memory) {
  DeltaCase c{"exact", 1, 1, false, 2, 40, 2, 12, 20, 2, Layout::sliced, false, false, false};
  c.decay = decay;
  c.group = 2;
  Decoding<T, S> whole(c, memory), taken(c, memory);
  std::vector<std::vector<float>> after{values_of(whole.state.states())};
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    whole.step(t);
    after.push_back(values_of(whole.state.states()));
  }
  Random random(3);
  for (std::int64_t t = 0; t < c.tokens;) {
    taken.step(t++);
    const std::int64_t most = taken.state.returnable();
    ASSERT_LE(most, std::min(memory, t));
    if (t % 3 != 0) continue;
    const auto count = static_cast<std::int64_t>(random.uniform(0.0, static_cast<double>(most) + 0.999));
    taken.state.roll_back(count);
    ASSERT_EQ(taken.state.tokens(), t - count);
    ASSERT_EQ(values_of(taken.state.states()), after[t - count]) << t << " tokens, " << count << " taken back";
    for (std::int64_t again = t - count; again < t; ++again) taken.step(again);
    ASSERT_EQ(values_of(taken.state.states()), after[t]);
  }
  EXPECT_TRUE(taken.data.o.same_bits(whole.data.o));
  if (memory > 0) {
    taken.state.roll_back(std::min(memory, taken.state.returnable()));
    EXPECT_EQ(values_of(taken.state.states()), after[taken.state.tokens()]);
  }
}

TEST(DecodeState, ReturnsToTheSameBits) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    for (const std::int64_t memory : {0, 1, 2, 5, 8}) {
      check<float, float>(decay, memory);
      check<float, bfloat16>(decay, memory);
      check<bfloat16, float>(decay, memory);
      check<bfloat16, bfloat16>(decay, memory);
    }
  }
}

// Without a return, the whole memory is at hand.
TEST(DecodeState, RemembersAsManyTokensAsAsked) {
  DeltaCase c{"exact", 1, 1, false, 1, 30, 1, 4, 4, 1, Layout::contiguous, false, false, false};
  Decoding<float, float> d(c, 7);
  for (std::int64_t t = 0; t < 30; ++t) {
    d.step(t);
    EXPECT_EQ(d.state.returnable(), std::min<std::int64_t>(7, t + 1)) << t;
  }
  expect_error([&] { d.state.roll_back(8); }, "count", "got 8, expected 0 to 7");
  expect_error([&] { d.state.roll_back(-1); }, "count", "got -1");
  expect_error([&] { DecodeState<float>(c.shape(), c.rule(), -1); }, "memory", "got -1");
  DeltaShape shape = c.shape();
  expect_error([&] { DecodeState<float>(shape, c.rule(), 2); }, "token count T", "got 30, expected 1");
  shape.tokens = 1;
  shape.packed = 2;
  expect_error([&] { DecodeState<float>(shape, c.rule(), 2); }, "packed sequence count N", "got 2, expected 0");
  shape.packed = 0;
  DeltaRule rule = c.rule();
  rule.decay = Decay(77);
  expect_error([&] { DecodeState<float>(shape, rule, 2); }, "decay", "got 77, expected one of enum Decay");
  shape.value_dim = -1;
  expect_error([&] { DecodeState<float>(shape, c.rule(), 2); }, "value dim V", "got -1");
}

TEST(DecodeState, StartsFromAGivenState) {
  DeltaCase c{"exact", 1, 1, false, 1, 30, 1, 4, 4, 1, Layout::sliced, true, false, false};
  Decoding<float, float> d(c, 3);
  d.step(0);
  d.state.restore(d.data.initial_state.view());
  EXPECT_EQ(d.state.tokens(), 0);
  EXPECT_EQ(d.state.returnable(), 0);
  const auto expected = d.data.initial_state.values();
  const auto got = values_of(d.state.states());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], static_cast<float>(expected[i]));
  expect_error([&] { d.state.restore({}); }, "states", "got nothing");
}

}  // namespace
}  // namespace efla::test
