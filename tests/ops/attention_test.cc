// Softmax attention over pages against float64, on every SIMD target of this machine.
#include "efla/ops/layers/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/cpu/common/target.h"
#include "efla/ops/layers/glu.h"
#include "efla/ops/layers/rms_norm.h"
#include "efla/ops/layers/rope.h"
#include "tests/support/attention_case.h"
#include "tests/support/compare.h"
#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"

namespace efla {
namespace {

using test::Layout;
using test::run_attention;
using test::TextPages;
using test::TextRows;

// The naive implementation in float32: all scores of a row, their softmax, the weighted sum.
template <class S>
std::vector<double> naive(const AttentionShape& shape, TextRows& text, double scale, std::int64_t first_key) {
  const auto q = text.q.view(), k = text.k.view(), v = text.v.view();
  std::vector<double> o;
  const auto stored = [](float x) { return to_float(from_state<S>(x)); };
  for (std::int64_t t = 0; t < q.extent[0]; ++t) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const std::int64_t g = h / shape.group();
      std::vector<float> weights;
      float sum = 0.0F;
      const std::int64_t first = std::min(first_key, t);
      for (std::int64_t s = first; s <= t; ++s) {
        float score = 0.0F;
        for (std::int64_t i = 0; i < shape.key_dim; ++i) score += q(t, h, i) * stored(k(s, g, i));
        weights.push_back(static_cast<float>(scale) * score);
      }
      const float largest = *std::max_element(weights.begin(), weights.end());
      for (float& weight : weights) sum += weight = std::exp(weight - largest);
      for (std::int64_t j = 0; j < shape.value_dim; ++j) {
        float value = 0.0F;
        for (std::int64_t s = first; s <= t; ++s) {
          value += weights[static_cast<std::size_t>(s - first)] * stored(v(s, g, j));
        }
        o.push_back(value / sum);
      }
    }
  }
  return o;
}

// Computes a text in pieces of at most `most` tokens, and returns the outputs.
template <class S>
std::vector<double> in_pieces(const AttentionShape& shape, TextRows& text, double scale, std::int64_t most,
                              const RunOptions& options, std::int64_t first_key = 0) {
  const std::int64_t tokens = text.q.view().extent[0];
  const TextPages<S> pages(shape, tokens);
  text.o.poison();
  for (std::int64_t begin = 0; begin < tokens; begin += most) {
    const AttentionRun<S> run = pages.run(begin, std::min(most, tokens - begin));
    auto p = test::problem_of(shape, text, run);
    p.scale = scale;
    p.first_key = first_key;
    attention_forward(p, options);
  }
  EXPECT_TRUE(text.o.sentinels_intact());
  return text.o.values();
}

template <class S>
void expect_reference(const AttentionShape& shape, TextRows& text, double scale, std::int64_t most,
                      std::int64_t first_key = 0) {
  const auto expected = in_pieces<S>(shape, text, scale, most, {"ref"}, first_key);
  ThreadPool pool(3);
  const auto got = in_pieces<S>(shape, text, scale, most, {"simd", {.pool = &pool}}, first_key);
  const double used = std::isnan(scale) ? 1 / std::sqrt(static_cast<double>(shape.key_dim)) : scale;
  EXPECT_EQ(test::disagreement(got, expected, naive<S>(shape, text, used, first_key), test::tolerance_of("float32")),
            "")
      << "H " << shape.heads << ", G " << shape.key_value_heads << ", K " << shape.key_dim << ", V " << shape.value_dim
      << ", P " << shape.page_tokens << ", tokens " << text.q.view().extent[0] << ", pieces of " << most;
}

class AttentionOnTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { cpu::use_target(GetParam()); }
  void TearDown() override { cpu::use_target(""); }
};

struct Case {
  AttentionShape shape;
  std::int64_t tokens, most;
  Layout layout = Layout::contiguous;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {{1, 1, 1, 1, 64}, 1, 1},          {{1, 1, 3, 5, 64}, 70, 70, Layout::sliced},
      {{2, 1, 16, 16, 64}, 64, 64},      {{3, 3, 17, 17, 64}, 65, 1, Layout::reversed},
      {{8, 2, 256, 256, 64}, 130, 130},  {{8, 2, 256, 256, 128}, 200, 7, Layout::sliced},
      {{6, 2, 128, 128, 192}, 400, 100}, {{7, 1, 64, 64, 64}, 150, 150, Layout::head_major},
      {{24, 4, 96, 192, 64}, 90, 45},    {{30, 30, 128, 128, 64}, 70, 70, Layout::column_major},
      {{12, 1, 40, 72, 128}, 300, 64},   {{130, 1, 8, 8, 64}, 66, 33},
      {{5, 5, 33, 31, 64}, 600, 250},    {{2, 1, 40, 40, 512}, 1100, 1100},
      {{1, 1, 8, 12, 64}, 2500, 999},
  };
  return all;
}

TEST_P(AttentionOnTarget, IsTheFloat64Result) {
  Random random(1);
  for (const Case& c : cases()) {
    TextRows text = test::random_text(c.shape, c.tokens, random, c.layout);
    expect_reference<float>(c.shape, text, NAN, c.most);
    expect_reference<bfloat16>(c.shape, text, NAN, c.most);
  }
}

TEST_P(AttentionOnTarget, FirstKeysAreUsedByNoLaterToken) {
  Random random(3);
  for (const Case& c : cases()) {
    TextRows text = test::random_text(c.shape, c.tokens, random, c.layout);
    expect_reference<float>(c.shape, text, NAN, c.most, 1);
    expect_reference<bfloat16>(c.shape, text, NAN, c.most, 63);
  }
}

TEST_P(AttentionOnTarget, RandomProblems) {
  Random random(2);
  for (int i = 0; i < 40; ++i) {
    AttentionShape shape;
    shape.key_value_heads = 1 + random.below(4);
    shape.heads = shape.key_value_heads * (1 + random.below(9));
    shape.key_dim = 1 + random.below(i % 3 == 0 ? 256 : 40);
    shape.value_dim = i % 2 == 0 ? shape.key_dim : 1 + random.below(100);
    shape.page_tokens = kAttentionBlock * (1 + random.below(3));
    const std::int64_t tokens = 1 + random.below(shape.key_dim > 100 ? 100 : 300);
    TextRows text = test::random_text(shape, tokens, random, static_cast<Layout>(random.below(5)));
    const std::int64_t most = 1 + random.below(static_cast<std::uint32_t>(tokens));
    const double scale = random.uniform(-1.0, 1.0);
    i % 2 == 0 ? expect_reference<float>(shape, text, scale, most)
               : expect_reference<bfloat16>(shape, text, scale, most);
  }
}

// Scores are integers, which float32 has exactly, so that the weights are exact for any gap between the scores.
TEST_P(AttentionOnTarget, ScoresFarApart) {
  Random random(3);
  const AttentionShape shape{4, 2, 64, 24, 64};
  for (const double scale : {1.0, 16.0, 1024.0, 0x1p40}) {
    TextRows text = test::random_text(shape, 300, random);
    for (auto* tensor : {&text.q, &text.k}) {
      std::vector<double> integers;
      for (std::int64_t i = 0; i < tensor->view().size(); ++i) integers.push_back(random.below(5) - 2.0);
      tensor->assign(integers);
    }
    expect_reference<float>(shape, text, scale, 300);
    expect_reference<bfloat16>(shape, text, -scale, 77);
  }
}

TEST_P(AttentionOnTarget, EqualScoresGiveTheMeanOfTheValues) {
  Random random(4);
  const AttentionShape shape{2, 1, 32, 20, 64};
  TextRows text = test::random_text(shape, 700, random);
  text.q.assign(std::vector<double>(static_cast<std::size_t>(text.q.view().size())));
  expect_reference<float>(shape, text, 1.0, 300);
}

// A score of −∞ in float32 has no weight, whether it comes first, between others or alone in its block.
TEST_P(AttentionOnTarget, AScoreOfMinusInfinityHasNoWeight) {
  Random random(5);
  const AttentionShape shape{1, 1, 4, 8, 64};
  TextRows text = test::random_text(shape, 200, random);
  std::vector<double> q(800, 1.0), k = text.k.values();
  for (std::size_t s = 0; s < 200; ++s) {
    if (s == 70 || (s > 0 && s < 64) || s >= 128) std::fill_n(k.begin() + static_cast<std::ptrdiff_t>(4 * s), 4, -2e38);
  }
  text.q.assign(q);
  text.k.assign(k);
  const auto expected = in_pieces<float>(shape, text, 1.0, 200, {"ref"});
  const auto got = in_pieces<float>(shape, text, 1.0, 200, {"simd"});
  EXPECT_LE(test::distance(got, expected).rms, 1e-6);
}

// Expects that exactly the outputs for which is_nan(t, h, j) holds are NaN, and the others have the bits of `before`.
template <class IsNan>
void expect_nan_exactly(const View<float, 3>& o, const std::vector<double>& before, const IsNan& is_nan) {
  std::size_t i = 0;
  for (std::int64_t t = 0; t < o.extent[0]; ++t) {
    for (std::int64_t h = 0; h < o.extent[1]; ++h) {
      for (std::int64_t j = 0; j < o.extent[2]; ++j, ++i) {
        if (is_nan(t, h, j)) {
          ASSERT_TRUE(std::isnan(o(t, h, j))) << t << " " << h << " " << j;
        } else {
          ASSERT_EQ(o(t, h, j), before[i]) << t << " " << h << " " << j;
        }
      }
    }
  }
}

TEST_P(AttentionOnTarget, ANanReachesLaterTokensOfItsHeadAlone) {
  Random random(6);
  const AttentionShape shape{4, 2, 20, 21, 64};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::int64_t s : {0, 5, 63, 64, 131}) {
    const TextRows text = test::random_text(shape, 140, random);
    TextRows clean = text;
    const auto before = in_pieces<float>(shape, clean, NAN, 140, {});
    TextRows in_key = text, in_value = text, in_query = text;
    in_key.k.view()(s, 1, 3) = nan;
    in_pieces<float>(shape, in_key, NAN, 140, {});
    expect_nan_exactly(in_key.o.view(), before,
                       [&](std::int64_t t, std::int64_t h, std::int64_t) { return t >= s && h >= 2; });
    in_value.v.view()(s, 0, 20) = nan;
    in_pieces<float>(shape, in_value, NAN, 140, {});
    expect_nan_exactly(in_value.o.view(), before,
                       [&](std::int64_t t, std::int64_t h, std::int64_t j) { return t >= s && h < 2 && j == 20; });
    in_query.q.view()(s, 2, 0) = nan;
    in_pieces<float>(shape, in_query, NAN, 140, {});
    expect_nan_exactly(in_query.o.view(), before,
                       [&](std::int64_t t, std::int64_t h, std::int64_t) { return t == s && h == 2; });
  }
}

TEST_P(AttentionOnTarget, PagesHoldTheRoundedKeysAndValues) {
  Random random(7);
  const AttentionShape shape{2, 2, 5, 7, 128};
  TextRows text = test::random_text(shape, 200, random, Layout::sliced);
  const TextPages<bfloat16> pages(shape, 200);
  run_attention(shape, text, pages, 0, 150);
  run_attention(shape, text, pages, 150, 50);
  for (std::int64_t t = 0; t < 200; ++t) {
    for (std::int64_t g = 0; g < 2; ++g) {
      const bfloat16* keys = pages.key_pages[t / 128] + g * 5 * 128 + t % 128;
      const bfloat16* values = pages.value_pages[t / 128] + (g * 128 + t % 128) * 7;
      for (std::int64_t i = 0; i < 5; ++i) ASSERT_EQ(keys[i * 128].bits, to_bfloat16(text.k.view()(t, g, i)).bits);
      for (std::int64_t j = 0; j < 7; ++j) ASSERT_EQ(values[j].bits, to_bfloat16(text.v.view()(t, g, j)).bits);
    }
  }
  EXPECT_TRUE(std::isnan(to_float(pages.key_pages[1][200 - 128])));  // the token after the text
}

// A projection may have [query | gate] per head. The norm, rope and the gate then take views of it.
TEST(Attention, NormRopeAndGateTakeViewsOfOneProjection) {
  Random random(9);
  const std::int64_t tokens = 5, heads = 3, dim = 32, rows = tokens * heads;
  test::Tensor<float, 2> projected({rows, 2 * dim}), query({rows, dim}), gate({rows, dim}), o({rows, dim}),
      gated({rows, dim});
  projected.assign(test::normal_numbers(rows * 2 * dim, random));
  o.assign(test::normal_numbers(rows * dim, random));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(projected.view().at(r), dim, query.view().at(r));
    std::copy_n(projected.view().at(r) + dim, dim, gate.view().at(r));
  }
  const View<float, 2> query_view{projected.view().data, {rows, dim}, {2 * dim, 1}},
      gate_view{projected.view().data + dim, {rows, dim}, {2 * dim, 1}};
  const std::vector<float> weight(static_cast<std::size_t>(dim), 1.0F + 0.25F);  // 1 + w of a zero-centred norm
  const std::vector<std::int64_t> positions{7, 8, 9, 10, 11};
  const auto attend = [&](const View<float, 2>& q, const View<float, 2>& z) {
    rms_norm_forward<float>({q, View<const float, 1>::contiguous(weight.data(), {dim}), 1e-6F, q});
    const View<float, 3> of_heads{q.data, {tokens, heads, dim}, {heads * q.stride[0], q.stride[0], 1}};
    rope_forward({of_heads, View<const std::int64_t, 1>::contiguous(positions.data(), {tokens}), 8, 1e7, of_heads});
    glu_forward<float>({z, o.view(), gated.view(), GateActivation::sigmoid});
    return gated.values();
  };
  const auto expected = attend(query.view(), gate.view());
  EXPECT_EQ(attend(query_view, gate_view), expected);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < dim; ++i) {
      ASSERT_EQ(query_view(r, i), query.view()(r, i));
      ASSERT_EQ(gate_view(r, i), gate.view()(r, i));
      const double sigmoid = 1 / (1 + std::exp(-static_cast<double>(gate.view()(r, i))));
      ASSERT_NEAR(gated.view()(r, i), o.view()(r, i) * sigmoid, 1e-6);
    }
  }
}

TEST(Attention, RefusesWhatDoesNotFit) {
  Random random(8);
  const AttentionShape shape{4, 2, 8, 6, 64};
  TextRows text = test::random_text(shape, 70, random);
  const TextPages<float> pages(shape, 70);
  AttentionRun<float> run = pages.run(0, 70);
  const auto expect = [&](const char* argument, const char* says, const auto& change) {
    auto p = test::problem_of(shape, text, run);
    change(p);
    test::expect_error([&] { attention_forward(p); }, argument, says);
  };
  using Problem = AttentionForward<float>;
  expect("query heads H", "got 5, expected a multiple of G = 2", [](Problem& p) { p.shape.heads = 5; });
  expect("key and value heads G", "got 0", [](Problem& p) { p.shape.key_value_heads = 0; });
  expect("page tokens P", "got 96, expected a multiple of 64", [](Problem& p) { p.shape.page_tokens = 96; });
  expect("key dim K", "got 0", [](Problem& p) { p.shape.key_dim = 0; });
  expect("scale", "got inf", [](Problem& p) { p.scale = INFINITY; });
  expect("first_key", "got 64", [](Problem& p) { p.first_key = 64; });
  expect("q", "got nothing, expected a tensor of shape [70, 4, 8]", [](Problem& p) { p.q = {}; });
  expect("k", "got shape [70, 2, 7], expected shape [70, 2, 8]", [](Problem& p) { p.k.extent[2] = 7; });
  expect("v", "expected shape [70, 2, 6]", [](Problem& p) { p.v.extent[0] = 71; });
  expect("o", "got nothing", [](Problem& p) { p.o = {}; });
  run.begin = -1;
  expect("runs[0].begin", "got -1", [](Problem&) {});
  run = pages.run(0, 0);
  expect("runs[0].tokens", "got 0", [](Problem&) {});
  run = pages.run(60, 70);
  expect("runs[0].key_pages", "got 2, expected at least 3 pages for 130 tokens", [](Problem&) {});
  run = pages.run(0, 70);
  run.value_pages = run.value_pages.first(1);
  expect("runs[0].value_pages", "got 1, expected at least 2 pages for 70 tokens", [](Problem&) {});
  std::vector<float*> missing{pages.key_pages[0], nullptr};
  run = pages.run(0, 70);
  run.key_pages = missing;
  expect("runs[0].key_pages[1]", "got nothing, expected a page", [](Problem&) {});
  const std::vector<AttentionRun<float>> twice{pages.run(0, 64), pages.run(0, 6)};
  expect("runs[1].key_pages", "got the page that runs[0] writes, expected one run per text",
         [&](Problem& p) { p.runs = twice; });
}

TEST(Attention, ACallWithoutRunsDoesNothing) {
  AttentionForward<float> p;
  p.shape = {4, 2, 8, 8, 64};
  EXPECT_EQ(attention_forward(p).implementation, "simd");
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionOnTarget, testing::ValuesIn(cpu::supported_targets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace efla
