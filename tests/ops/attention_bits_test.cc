// An output of attention has the same bits however its text is cut into calls, whatever is beside it, and for any page
// size and number of threads.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/cpu/attention/plan.h"
#include "efla/cpu/common/target.h"
#include "efla/ops/layers/attention.h"
#include "tests/support/attention_case.h"

namespace efla {
namespace {

using test::run_attention;
using test::TextPages;
using test::TextRows;

constexpr AttentionShape kShape{4, 2, 9, 68, 64};  // several vectors of value columns, and a part of one
constexpr std::int64_t kTokens = 2 * cpu::kAttentionSegment + 100;  // three segments, and a part of a block

template <class S>
TextRows whole_text(TextRows text, const AttentionShape& shape = kShape, int threads = 1) {
  const TextPages<S> pages(shape, kTokens);
  ThreadPool pool(threads);
  text.o.poison();
  run_attention(shape, text, pages, 0, kTokens, {"simd", {.pool = &pool}});
  return text;
}

class AttentionBits : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { cpu::use_target(GetParam()); }
  void TearDown() override { cpu::use_target(""); }

  // Expects the bits of `expected` from `compute`, which computes the outputs of a copy of the text.
  template <class S, class F>
  void expect_bits(const TextRows& expected, const char* what, const F& compute) {
    TextRows text = expected;
    text.o.poison();
    const TextPages<S> pages(kShape, kTokens);
    compute(text, pages);
    EXPECT_TRUE(text.o.same_bits(expected.o)) << what;
  }

  template <class S>
  void expect_same_bits() {
    Random random(1);
    const TextRows text = whole_text<S>(test::random_text(kShape, kTokens, random));
    for (const int threads : {2, 3, 7}) {
      EXPECT_TRUE(whole_text<S>(text, kShape, threads).o.same_bits(text.o)) << threads;
    }
    AttentionShape large_pages = kShape;
    large_pages.page_tokens = 320;
    EXPECT_TRUE(whole_text<S>(text, large_pages).o.same_bits(text.o));
    ThreadPool pool(3);
    const RunOptions options{"simd", {.pool = &pool}};
    expect_bits<S>(text, "token by token", [&](TextRows& of, const TextPages<S>& pages) {
      for (std::int64_t t = 0; t < kTokens; ++t) run_attention(kShape, of, pages, t, 1, options);
    });
    for (int i = 0; i < 4; ++i) {
      expect_bits<S>(text, "random cuts", [&](TextRows& of, const TextPages<S>& pages) {
        for (std::int64_t t = 0, count = 0; t < kTokens; t += count) {
          count = std::min<std::int64_t>(kTokens - t, 1 + random.below(i % 2 == 0 ? 9 : 600));
          ThreadPool some(1 + static_cast<int>(random.below(4)));
          run_attention(kShape, of, pages, t, count, {"simd", {.pool = &some}});
        }
      });
    }
  }
};

TEST_P(AttentionBits, DoNotDependOnCutsThreadsAndPages) {
  expect_same_bits<float>();
  expect_same_bits<bfloat16>();
}

// A draft's rejected tokens are computed again with other keys and values, in the same place.
TEST_P(AttentionBits, DoNotDependOnRejectedDrafts) {
  Random random(2);
  const TextRows text = whole_text<bfloat16>(test::random_text(kShape, kTokens, random));
  ThreadPool pool(2);
  const RunOptions options{"simd", {.pool = &pool}};
  expect_bits<bfloat16>(text, "drafts", [&](TextRows& of, const TextPages<bfloat16>& pages) {
    const std::int64_t prompt = kTokens - 100;
    run_attention(kShape, of, pages, 0, prompt, options);
    for (std::int64_t t = prompt, kept = 0; t < kTokens; t += kept) {
      const std::int64_t drafted = std::min<std::int64_t>(kTokens - t, 1 + random.below(8));
      kept = 1 + random.below(static_cast<std::uint32_t>(drafted));
      TextRows draft = of;
      for (std::int64_t i = kept; i < drafted; ++i) {  // the draft has other tokens after the kept ones
        for (std::int64_t g = 0; g < kShape.key_value_heads; ++g) {
          draft.k.view()(t + i, g, 0) = 30.0F;
          draft.v.view()(t + i, g, 0) = std::numeric_limits<float>::infinity();
        }
      }
      run_attention(kShape, draft, pages, t, drafted, options);
      for (std::int64_t i = 0; i < kept; ++i) {
        for (std::int64_t h = 0; h < kShape.heads; ++h) {
          for (std::int64_t j = 0; j < kShape.value_dim; ++j) of.o.view()(t + i, h, j) = draft.o.view()(t + i, h, j);
        }
      }
    }
  });
}

// Texts of other lengths in the same call, prompts and decoded tokens, in any order.
TEST_P(AttentionBits, DoNotDependOnOtherTextsOfTheCall) {
  Random random(3);
  const std::vector<std::int64_t> lengths{kTokens, 1, 64, 700, 65, 513};
  std::vector<TextRows> texts, alone;
  std::vector<TextPages<float>> pages;
  for (const auto length : lengths) {
    texts.push_back(test::random_text(kShape, length, random));
    alone.push_back(texts.back());
    run_attention(kShape, alone.back(), TextPages<float>(kShape, length), 0, length);
    pages.emplace_back(kShape, length);
  }
  ThreadPool pool(3);
  std::vector<std::int64_t> done(lengths.size());
  for (bool more = true; more;) {
    more = false;
    std::vector<AttentionRun<float>> runs;
    std::vector<std::size_t> of;
    std::int64_t rows = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const std::int64_t left = lengths[i] - done[i];
      if (left == 0 || random.below(3) == 0) continue;
      runs.push_back(pages[i].run(done[i], std::min<std::int64_t>(left, 1 + random.below(i % 2 == 0 ? 400 : 40))));
      of.push_back(i);
      rows += runs.back().tokens;
    }
    TextRows together = test::random_text(kShape, std::max<std::int64_t>(rows, 1), random);
    const auto copy = [&](bool back) {
      std::int64_t row = 0;
      for (std::size_t n = 0; n < runs.size(); ++n) {
        TextRows& text = texts[of[n]];
        for (std::int64_t t = 0; t < runs[n].tokens; ++t, ++row) {
          const std::int64_t at = runs[n].begin + t;
          const auto copy_row = [](const View<float, 3>& from, std::int64_t r, const View<float, 3>& to,
                                   std::int64_t w) { std::copy_n(from.at(r), from.stride[0], to.at(w)); };
          if (back) {
            copy_row(together.o.view(), row, text.o.view(), at);
          } else {
            copy_row(text.q.view(), at, together.q.view(), row);
            copy_row(text.k.view(), at, together.k.view(), row);
            copy_row(text.v.view(), at, together.v.view(), row);
          }
        }
      }
    };
    copy(false);
    AttentionForward<float> p;
    p.shape = kShape;
    p.runs = runs;
    p.q = test::rows_of<const float>(together.q.view(), 0, rows);
    p.k = test::rows_of<const float>(together.k.view(), 0, rows);
    p.v = test::rows_of<const float>(together.v.view(), 0, rows);
    p.o = test::rows_of(together.o.view(), 0, rows);
    attention_forward(p, {"simd", {.pool = &pool}});
    copy(true);
    for (std::size_t n = 0; n < runs.size(); ++n) done[of[n]] += runs[n].tokens;
    for (std::size_t i = 0; i < lengths.size(); ++i) more = more || done[i] < lengths[i];
  }
  for (std::size_t i = 0; i < lengths.size(); ++i) EXPECT_TRUE(texts[i].o.same_bits(alone[i].o)) << i;
}

// A fork continues from shared pages and a copy of the last page, and leaves the shared pages as they were.
TEST_P(AttentionBits, DoNotDependOnSharedPages) {
  Random random(4);
  const TextRows text = whole_text<bfloat16>(test::random_text(kShape, kTokens, random));
  const std::int64_t fork = 700;
  const auto shared = static_cast<std::size_t>(fork / kShape.page_tokens);
  expect_bits<bfloat16>(text, "fork", [&](TextRows& of, const TextPages<bfloat16>& pages) {
    run_attention(kShape, of, pages, 0, fork);
    const TextPages<bfloat16> before(pages);  // a copy of every page
    TextPages<bfloat16> forked(pages);
    forked.share(pages, shared);
    run_attention(kShape, of, forked, fork, kTokens - fork);
    for (std::size_t page = 0; page < pages.key_pages.size(); ++page) {
      EXPECT_EQ(std::memcmp(pages.key_pages[page], before.key_pages[page],
                            static_cast<std::size_t>(kShape.key_page_elements()) * sizeof(bfloat16)),
                0);
      EXPECT_EQ(std::memcmp(pages.value_pages[page], before.value_pages[page],
                            static_cast<std::size_t>(kShape.value_page_elements()) * sizeof(bfloat16)),
                0);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionBits, testing::ValuesIn(cpu::supported_targets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace efla
