// Several tokens of entries with states in a pool are single steps of those states, to the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"

namespace efla::test {
namespace {

constexpr std::int64_t kTokens = 5, kPool = 4;
const std::vector<std::int64_t> kSlots{3, -1, 0};

DeltaCase pool_case(Decay decay, EraseKey erase_key = EraseKey::none) {
  DeltaCase c{"exact", 1, 1, true, std::ssize(kSlots), kTokens, 2, 12, 20, 2, Layout::sliced, false, false, false};
  c.decay = decay;
  c.group = 2;
  c.erase_key = erase_key;
  return c;
}

template <class T, class S>
DeltaSteps<T, S> steps_of(const DeltaForward<T>& f, const View<S, 4>& states,
                          const View<const std::int64_t, 1>& slots) {
  return {f.shape, f.rule, f.q, f.k, f.v, f.beta, f.g, slots, states, f.o, {}, f.erase_key};
}

template <class S>
void fill(Tensor<S, 4>& states) {
  Random random(5);
  std::vector<double> values(states.view().size());
  for (double& x : values) x = random.normal();
  states.assign(values);
}

template <class T, class S>
void check(const DeltaCase& c, const std::string& implementation) {
  SCOPED_TRACE(testing::Message() << implementation << ' ' << name_of(c) << ' ' << cpu::target_name());
  DeltaData<T> together(c), single(c);
  const std::array<std::int64_t, 4> extent{kPool, together.shape.value_heads, c.key_dim, c.value_dim};
  Tensor<S, 4> pool(extent, Layout::sliced), initial(extent, Layout::sliced);
  fill(pool);
  fill(initial);
  const auto slots = View<const std::int64_t, 1>::contiguous(kSlots.data(), {std::ssize(kSlots)});
  delta_steps(steps_of(together.forward(), pool.view(), slots), {.implementation = implementation});

  Tensor<S, 4> own({c.batch, extent[1], c.key_dim, c.value_dim}, Layout::contiguous);
  const auto copy = [&](auto&& f) {
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t h = 0; h < extent[1]; ++h) {
        for (std::int64_t i = 0; i < c.key_dim; ++i) {
          for (std::int64_t j = 0; j < c.value_dim && kSlots[b] >= 0; ++j) {
            f(own.view()(b, h, i, j), initial.view()(kSlots[b], h, i, j));
          }
        }
      }
    }
  };
  own.assign(std::vector<double>(own.view().size()));
  copy([](S& to, const S& from) { to = from; });
  run_steps(single.forward(), own.view(), {.implementation = implementation});
  copy([](const S& from, S& to) { to = from; });
  EXPECT_TRUE(pool.same_bits(initial));
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t h = 0; h < extent[1]; ++h) {
        for (std::int64_t j = 0; j < c.value_dim; ++j) {
          const float expected = kSlots[b] < 0 ? 0.0F : to_float(single.o.view()(b, t, h, j));
          ASSERT_EQ(to_float(together.o.view()(b, t, h, j)), expected) << b << ' ' << t << ' ' << h << ' ' << j;
        }
      }
    }
  }
  EXPECT_TRUE(together.sentinels_intact() && pool.sentinels_intact());
}

void check_all(const std::string& implementation) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    for (const EraseKey erase_key : {EraseKey::none, EraseKey::gated}) {
      const DeltaCase c = pool_case(decay, erase_key);
      check<float, float>(c, implementation);
      check<float, bfloat16>(c, implementation);
      check<bfloat16, float>(c, implementation);
      check<bfloat16, bfloat16>(c, implementation);
    }
  }
}

TEST(DeltaSteps, AreSingleStepsOfThePoolsStates) {
  for (const std::string& target : cpu::supported_targets()) {
    const OnTarget guard(target);
    for (const std::string& row : fast_rows(delta_step_implementations())) check_all(row);
  }
  check_all("ref");
}

// A state of the pool keeps the first tokens of its entry, as if there had been no others; all outputs are computed.
template <class T, class S>
void check_kept(const std::string& implementation) {
  const DeltaCase c = pool_case(Decay::scalar);
  DeltaData<T> all(c), some(c);
  const std::array<std::int64_t, 4> extent{kPool, all.shape.value_heads, c.key_dim, c.value_dim};
  const auto slots = View<const std::int64_t, 1>::contiguous(kSlots.data(), {c.batch});
  for (const std::vector<std::int64_t>& kept : {std::vector<std::int64_t>{3, 2, kTokens}, {0, 0, 1}}) {
    Tensor<S, 4> rolled_back(extent, Layout::sliced), whole(extent, Layout::sliced);
    fill(rolled_back);
    fill(whole);
    DeltaSteps<T, S> p = steps_of(some.forward(), rolled_back.view(), slots);
    p.kept = View<const std::int64_t, 1>::contiguous(kept.data(), {c.batch});
    delta_steps(p, {.implementation = implementation});
    delta_steps(steps_of(all.forward(), whole.view(), slots), {.implementation = implementation});
    EXPECT_TRUE(some.o.same_bits(all.o));
    Tensor<S, 4> expected(extent, Layout::sliced);
    for (std::int64_t slot = 0; slot < kPool; ++slot) {
      const auto entry = std::find(kSlots.begin(), kSlots.end(), slot) - kSlots.begin();
      const std::int64_t tokens = entry < c.batch ? kept[entry] : 0;
      fill(expected);
      DeltaSteps<T, S> first = steps_of(all.forward(), expected.view(), slots);
      first.shape.tokens = tokens;
      for (auto* view : {&first.q, &first.k, &first.v}) view->extent[1] = tokens;
      first.beta.extent[1] = first.g.extent[1] = first.o.extent[1] = tokens;
      if (tokens > 0) delta_steps(first, {.implementation = implementation});
      for (std::int64_t h = 0; h < extent[1]; ++h) {
        for (std::int64_t i = 0; i < c.key_dim; ++i) {
          for (std::int64_t j = 0; j < c.value_dim; ++j) {
            ASSERT_EQ(to_float(rolled_back.view()(slot, h, i, j)), to_float(expected.view()(slot, h, i, j))) << slot;
          }
        }
      }
    }
  }
}

TEST(DeltaSteps, RollBackTokensThatAreNotKept) {
  for (const std::string& row : fast_rows(delta_step_implementations())) {
    check_kept<float, float>(row);
    check_kept<bfloat16, bfloat16>(row);
  }
  check_kept<float, float>("ref");
}

TEST(DeltaSteps, RefuseWhatDoesNotFit) {
  DeltaData<float> data(pool_case(Decay::none));
  Tensor<float, 4> pool({kPool, data.shape.value_heads, 12, 20}, Layout::contiguous);
  std::vector<std::int64_t> bad = kSlots;
  DeltaSteps<float> p = steps_of(data.forward(), pool.view(), View<const std::int64_t, 1>::contiguous(bad.data(), {3}));
  for (const std::int64_t slot : {-2, 4, 3}) {
    bad[2] = slot;
    expect_error([&] { delta_steps(p); }, "slots[2]", "expected -1 or a state of 4 that no other entry has");
  }
  bad = {0, kTokens + 1, 0};
  p.kept = p.slots;
  p.slots = {};
  p.states.extent[0] = 3;
  expect_error([&] { delta_steps(p); }, "kept[1]", "got 6, expected 0 to 5");
  p.states.extent[0] = kPool;
  p.kept = {};
  expect_error([&] { delta_steps(p); }, "states", "expected shape [3, 4, 12, 20]");
  p.shape.tokens = kMaxStepTokens + 1;
  expect_error([&] { delta_steps(p); }, "token count T", "got 9, expected 1 to 8");
}

}  // namespace
}  // namespace efla::test
