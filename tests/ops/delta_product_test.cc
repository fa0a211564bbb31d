// n steps per token are n tokens of which the first decays the state and the last is read, to the same bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "efla/rule/micro_steps.h"
#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"

namespace efla::test {
namespace {

DeltaCase product_case(std::int64_t n, std::int64_t tokens, Decay decay, EraseKey erase_key, Layout layout) {
  DeltaCase c{"exact", 1, 1, n != 2, 2, n * tokens, 2, 24, 40, 2, layout, true, true, true};
  c.decay = decay;
  c.group = 2;
  c.erase_key = erase_key;
  c.steps_per_token = n;
  return c;
}

// Returns rows of [B, T·n, …] with the rows of x [B, T, …] at step `step` of every token and zeros elsewhere.
std::vector<double> spread(const std::vector<double>& x, std::int64_t rows, std::int64_t n, std::int64_t step) {
  const std::int64_t width = std::ssize(x) / rows;
  std::vector<double> all(x.size() * n);
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(x.begin() + r * width, width, all.begin() + (r * n + step) * width);
  }
  return all;
}

// Returns the rows of step `step` of every token.
std::vector<double> gathered(const std::vector<double>& all, std::int64_t rows, std::int64_t n, std::int64_t step) {
  const std::int64_t width = std::ssize(all) / (rows * n);
  std::vector<double> x;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto first = all.begin() + (r * n + step) * width;
    x.insert(x.end(), first, first + width);
  }
  return x;
}

// A case, and the same with a token per step.
template <class T>
struct Pair {
  std::int64_t n, rows;
  DeltaData<T> product, tokens;

  explicit Pair(const DeltaCase& c)
      : n(c.steps_per_token), rows(c.batch * c.token_rows()), product(c), tokens(one_step_per_token(c)) {
    tokens.k.assign(product.k.values());
    tokens.v.assign(product.v.values());
    tokens.beta.assign(product.beta.values());
    if (product.erase_key.view()) tokens.erase_key.assign(product.erase_key.values());
    tokens.initial_state.assign(product.initial_state.values());
    tokens.dfinal_state.assign(product.dfinal_state.values());
    tokens.q.assign(spread(product.q.values(), rows, n, n - 1));
    tokens.dout.assign(spread(product.dout.values(), rows, n, n - 1));
    if (product.g.view()) tokens.g.assign(spread(product.g.values(), rows, n, 0));
  }

  static DeltaCase one_step_per_token(DeltaCase c) {
    c.steps_per_token = 1;
    return c;
  }

  void expect_equal(Results product_results, Results token_results) {
    ASSERT_EQ(product_results.size(), token_results.size());
    for (std::size_t i = 0; i < token_results.size(); ++i) {
      auto& [name, values] = token_results[i];
      if (name == "o" || name == "dq") values = gathered(values, rows, n, n - 1);
      if (name == "dg") values = gathered(values, rows, n, 0);
      EXPECT_EQ(product_results[i].second, values) << name;
    }
    EXPECT_TRUE(product.sentinels_intact());
  }
};

template <class T>
void check(const DeltaCase& c, const std::string& forward, const std::string& backward) {
  SCOPED_TRACE(testing::Message() << forward << ' ' << DTypeOf<T>::name << ' ' << cpu::target_name() << ' '
                                  << name_of(c));
  Pair<T> pair(c);
  ThreadPool pool(2);
  for (auto* data : {&pair.product, &pair.tokens}) run_forward(forward, *data, pool);
  pair.expect_equal(forward_results(pair.product), forward_results(pair.tokens));
  if (backward.empty()) return;
  for (auto* data : {&pair.product, &pair.tokens}) run_backward(backward, *data, pool);
  pair.expect_equal(backward_results(pair.product), backward_results(pair.tokens));
}

void check_all(const DeltaCase& c) {
  check<double>(c, "ref", "recurrent");
  for (const std::string& target : cpu::supported_targets()) {
    const OnTarget guard(target);
    check<float>(c, "chunk_simd", "chunk_simd");
    check<bfloat16>(c, "chunk_simd", "chunk_simd");
    check<float>(c, "recurrent_simd", "");
    check<bfloat16>(c, "recurrent_simd", "");
  }
}

// 33 tokens: chunks of 32 steps begin and end within tokens of 3 and 5 steps.
TEST(DeltaProduct, IsATokenPerStep) {
  for (const std::int64_t n : {2, 3, 4, 5}) {
    for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
      check_all(product_case(n, 33, decay, EraseKey::none, n == 3 ? Layout::column_major : Layout::sliced));
      check_all(product_case(n, 1, decay, EraseKey::none, Layout::contiguous));
    }
  }
}

TEST(DeltaProduct, TakesTwoKeysAndPackedSequences) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    DeltaCase c = product_case(3, 50, decay, EraseKey::gated, Layout::sliced);
    check_all(c);
    c.batch = 1;
    c.cu_seqlens = {0, 0, 3, 33, 99, 150};
    check_all(c);
  }
}

// Decode steps of several tokens, of which some are rolled back.
TEST(DeltaProduct, DecodesTokensOfSeveralSteps) {
  for (const std::int64_t n : {2, 4}) {
    for (const Decay decay : {Decay::none, Decay::channel}) {
      for (const std::string implementation : {"recurrent_simd", "ref"}) {
        SCOPED_TRACE(testing::Message() << implementation << " n " << n);
        Pair<float> pair(product_case(n, 8 / n, decay, EraseKey::gated, Layout::sliced));
        const std::vector<std::int64_t> kept{8 / n, 8 / n - 1}, kept_steps{8, 8 - n};
        const auto run = [&](DeltaData<float>& data, const std::vector<std::int64_t>& counts) {
          data.final_state.assign(data.initial_state.values());
          const DeltaForward<float> f = data.forward();
          DeltaSteps<float> p{f.shape, f.rule, f.q,        f.k, f.v, f.beta, f.g, {}, data.final_state.view(),
                              f.o,     {},     f.erase_key};
          p.kept = View<const std::int64_t, 1>::contiguous(counts.data(), {std::ssize(counts)});
          delta_steps(p, {.implementation = implementation});
        };
        run(pair.product, kept);
        run(pair.tokens, kept_steps);
        pair.expect_equal(forward_results(pair.product), forward_results(pair.tokens));
      }
    }
  }
}

TEST(DeltaProduct, RefusesRowsThatDoNotFit) {
  DeltaData<float> data(product_case(3, 10, Decay::scalar, EraseKey::none, Layout::contiguous));
  auto p = data.forward();
  p.q.extent[1] = 20;
  expect_error([&] { delta_forward(p); }, "q", "");
  p = data.forward();
  p.g.extent[1] = 30;
  expect_error([&] { delta_forward(p); }, "g", "");
  p = data.forward();
  p.o.extent[1] = 30;
  expect_error([&] { delta_forward(p); }, "o", "");
  DeltaCase packed = product_case(3, 10, Decay::none, EraseKey::none, Layout::contiguous);
  packed.batch = 1;
  packed.cu_seqlens = {0, 10, 30};
  DeltaData<float> ends(packed);
  expect_error([&] { delta_forward(ends.forward()); }, "cu_seqlens[1]", "a multiple of the 3 steps per token");
}

}  // namespace
}  // namespace efla::test
