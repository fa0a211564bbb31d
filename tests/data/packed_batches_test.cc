// What training reads: every token once an epoch, no document seen from another, the same from any start and for any
// number of ranks.
#include "efla/data/packed_batches.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include <gtest/gtest.h>

#include "efla/base/random.h"
#include "efla/data/permutation.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/token_folder.h"

namespace efla::data {
namespace {

using test::expect_error;

const io::TokenizerInfo kTokenizer{"count", std::string(64, '0'), 1 << 20, -1, 0};

// A corpus in which each token is its own place, counted from 1, so that a batch shows where it comes from.
class PackedBatchesTest : public testing::Test {
 protected:
  void make_corpus(std::uint64_t seed, int documents, std::uint32_t longest, std::size_t per_shard) {
    Random random(seed);
    std::vector<std::vector<std::int32_t>> all;
    std::int32_t next = 1;
    for (int d = 0; d < documents; ++d) {
      all.emplace_back(1 + random.below(longest));
      std::iota(all.back().begin(), all.back().end(), next);
      next += static_cast<std::int32_t>(all.back().size());
      for (std::size_t i = 0; i < all.back().size(); ++i) last_of_.push_back(next - 1);
    }
    tokens_ = next - 1;
    test::write_token_folder(temp_.path(), all, per_shard, kTokenizer);
    folder_.emplace(temp_.path());
  }

  // Everything that a batch promises but for which windows are in it.
  void check(const PackedBatch& batch, std::size_t rows, std::size_t length) const {
    ASSERT_EQ(batch.inputs.size(), rows * length);
    ASSERT_EQ(batch.targets.size(), rows * length);
    std::set<std::int64_t> boundaries{0};
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i < batch.inputs.size(); ++i) {
      const auto input = batch.inputs[i];
      tokens += input != 0;
      // The first of a row, of a document, or of the padding.
      if (i % length == 0 || input != batch.inputs[i - 1] + (input != 0) ||
          (input != 0 && last_of(input) != last_of(input - 1))) {
        boundaries.insert(static_cast<std::int64_t>(i));
      }
      const bool has_next = input != 0 && last_of(input) != input;
      EXPECT_EQ(batch.targets[i], has_next ? input + 1 : kIgnoreIndex) << i;
    }
    boundaries.insert(static_cast<std::int64_t>(rows * length));
    EXPECT_EQ(batch.cu_seqlens, std::vector<std::int64_t>(boundaries.begin(), boundaries.end()));
    EXPECT_EQ(batch.tokens, tokens);
  }

  std::int64_t last_of(std::int64_t token) const { return last_of_[static_cast<std::size_t>(token - 1)]; }

  test::TempFolder temp_;
  std::optional<io::TokenFolder> folder_;
  std::int64_t tokens_ = 0;
  std::vector<std::int64_t> last_of_;  // the last token of each token's document
};

TEST_F(PackedBatchesTest, WindowsHoldEveryTokenOnceAndKeepDocumentsApart) {
  make_corpus(1, 60, 40, 7);
  for (const std::int64_t length : {1, 2, 7, 16, 100, 5000}) {
    const TokenWindows windows(*folder_, length);
    EXPECT_EQ(windows.count(), (tokens_ + length - 1) / length);
    std::vector<std::int64_t> all(static_cast<std::size_t>(windows.count()));
    std::iota(all.begin(), all.end(), 0);
    const auto batch = windows.read(all);
    check(batch, all.size(), static_cast<std::size_t>(length));
    EXPECT_EQ(batch.tokens, tokens_);
    for (std::int64_t i = 0; i < tokens_; ++i) ASSERT_EQ(batch.inputs[static_cast<std::size_t>(i)], i + 1);
  }
}

TEST_F(PackedBatchesTest, AnEpochHoldsEveryTokenOnceInAnOrderOfItsOwn) {
  make_corpus(2, 50, 30, 100);
  PackedBatches batches(*folder_, {.length = 8, .batch = 6, .seed = 5});
  const auto windows = batches.windows();
  ASSERT_NE(windows % 6, 0);
  std::map<std::int64_t, int> seen;  // how often each token came in three epochs
  std::vector<std::int64_t> order;   // first token of each row
  while (std::cmp_less(order.size(), 3 * windows)) {
    const auto batch = batches.next();
    check(batch, 6, 8);
    for (std::int64_t row = 0; row < 6 && std::cmp_less(order.size(), 3 * windows); ++row) {
      const auto* inputs = batch.inputs.data() + row * 8;
      order.push_back(inputs[0]);
      for (int i = 0; i < 8; ++i) seen[inputs[i]] += inputs[i] != 0;
    }
  }
  seen.erase(0);
  EXPECT_EQ(std::ssize(seen), tokens_);
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](const auto& entry) { return entry.second == 3; }));
  const auto epoch = [&](std::int64_t e) {
    return std::vector(order.begin() + e * windows, order.begin() + (e + 1) * windows);
  };
  EXPECT_NE(epoch(0), epoch(1));
  EXPECT_NE(epoch(1), epoch(2));
  for (std::int64_t e = 0; e < 3; ++e) {
    auto sorted = epoch(e);
    EXPECT_FALSE(std::is_sorted(sorted.begin(), sorted.end()));
    std::sort(sorted.begin(), sorted.end());
    for (std::int64_t w = 0; w < windows; ++w) EXPECT_EQ(sorted[static_cast<std::size_t>(w)], w * 8 + 1);
  }
  PackedBatches other(*folder_, {.length = 8, .batch = 6, .seed = 6});
  EXPECT_NE(other.next().inputs, PackedBatches(*folder_, {.length = 8, .batch = 6, .seed = 5}).next().inputs);
}

TEST_F(PackedBatchesTest, GoesOnFromAnyPosition) {
  make_corpus(3, 30, 30, 4);
  const PackedOptions options{.length = 16, .batch = 4, .seed = 9};
  PackedBatches whole(*folder_, options);
  for (int step = 0; step < 40; ++step) {
    PackedBatches restarted(*folder_, options);
    restarted.seek(whole.position());
    const auto batch = whole.next(), again = restarted.next();
    EXPECT_EQ(again.inputs, batch.inputs);
    EXPECT_EQ(again.targets, batch.targets);
    EXPECT_EQ(again.cu_seqlens, batch.cu_seqlens);
    EXPECT_EQ(restarted.position(), whole.position());
  }
  EXPECT_GT(whole.position().epoch, 2);
}

TEST_F(PackedBatchesTest, RanksShareTheBatchOfOne) {
  make_corpus(4, 30, 30, 4);
  // A batch of 4 rows and one beyond an epoch.
  for (const std::int64_t rows : {4, 64}) {
    PackedBatches one(*folder_, {.length = 16, .batch = rows, .seed = 1});
    for (const int world : {2, 4}) {
      one.seek({0, 0});
      std::vector<PackedBatches> ranks;
      for (int rank = 0; rank < world; ++rank) {
        ranks.emplace_back(*folder_, PackedOptions{16, rows, 1, rank, world});
      }
      for (int step = 0; step < 25; ++step) {
        std::vector<std::int64_t> inputs, targets;
        for (auto& rank : ranks) {
          const auto part = rank.next();
          check(part, static_cast<std::size_t>(rows / world), 16);
          inputs.insert(inputs.end(), part.inputs.begin(), part.inputs.end());
          targets.insert(targets.end(), part.targets.begin(), part.targets.end());
        }
        const auto batch = one.next();
        EXPECT_EQ(inputs, batch.inputs);
        EXPECT_EQ(targets, batch.targets);
        for (const auto& rank : ranks) EXPECT_EQ(rank.position(), one.position());
      }
    }
  }
}

TEST_F(PackedBatchesTest, RefusesOptionsThatDoNotFit) {
  make_corpus(5, 3, 10, 1);
  const auto refused = [&](const PackedOptions& options, const std::string& argument) {
    expect_error([&] { PackedBatches(*folder_, options); }, argument, "packed batches");
  };
  refused({.length = 0, .batch = 1}, "length");
  refused({.length = 1, .batch = 0}, "batch");
  refused({.length = 1, .batch = 3, .world_size = 2}, "batch");
  refused({.length = 1, .batch = 2, .rank = 2, .world_size = 2}, "rank");
  refused({.length = 1, .batch = 2, .rank = -1}, "rank");
  refused({.length = 1, .batch = 2, .world_size = 0}, "world_size");
  PackedBatches batches(*folder_, {.length = 4, .batch = 2});
  expect_error([&] { batches.seek({-1, 0}); }, "epoch", "got -1");
  expect_error([&] { batches.seek({INT64_MAX, 0}); }, "epoch", "got 9223372036854775807, expected 0 to");
  expect_error([&] { batches.seek({0, batches.windows()}); }, "index", "expected 0 to");
}

TEST(Permutation, IsOneAndLooksRandom) {
  for (const std::int64_t count : {1, 2, 3, 4, 5, 16, 17, 1000, 4096, 4097}) {
    const Permutation order(count, 3, 1), other(count, 3, 2);
    std::set<std::int64_t> images;
    std::int64_t same = 0, neighbours = 0, agree = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto image = order(i);
      ASSERT_TRUE(image >= 0 && image < count);
      images.insert(image);
      same += image == i;
      neighbours += i > 0 && image == order(i - 1) + 1;
      agree += image == other(i);
    }
    EXPECT_EQ(std::ssize(images), count);
    if (count < 1000) continue;
    // Each is 1 on average in a random permutation; 12 or more has a chance below 1e-8.
    EXPECT_LT(same, 12);
    EXPECT_LT(neighbours, 12);
    EXPECT_LT(agree, 12);
  }
  // No memory, whatever the count.
  const Permutation huge(std::int64_t{1} << 61, 1, 1);
  EXPECT_NE(huge(0), huge(1));
}

}  // namespace
}  // namespace efla::data
