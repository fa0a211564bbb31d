// Models of families from their folders, against a reference in float64, and against logits and tokens that
// transformers computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "efla/io/safetensors/safetensors.h"
#include "efla/nn/families/family_model.h"
#include "tests/nn/family_reference.h"
#include "tests/nn/random_family.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace efla::nn {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<std::int32_t>;

const fs::path kGoldens = fs::path(EFLA_SHARED_DATA) / "hybrid-goldens";
constexpr std::int64_t kScoredEvery = 7;  // tokens from one with logits in the goldens to the next

// The tensors of a golden.safetensors.
class Golden {
 public:
  explicit Golden(const fs::path& folder) : file_(folder / "golden.safetensors") {}

  Ids ids(const char* name, std::int64_t row = 0) const {
    const auto& tensor = *file_.find(name);
    std::vector<std::int64_t> wide(static_cast<std::size_t>(tensor.shape[1]));
    std::memcpy(wide.data(), tensor.bytes.data() + row * tensor.shape[1] * std::int64_t{sizeof(std::int64_t)},
                wide.size() * sizeof(std::int64_t));
    return {wide.begin(), wide.end()};
  }
  // Returns the logits after every kScoredEvery-th token of a text.
  std::vector<float> logits(std::int64_t row) const {
    const auto& tensor = *file_.find("logits");
    std::vector<float> all(static_cast<std::size_t>(tensor.shape[1] * tensor.shape[2]));
    std::memcpy(all.data(), tensor.bytes.data() + row * std::ssize(all) * std::int64_t{sizeof(float)},
                all.size() * sizeof(float));
    return all;
  }

 private:
  io::SafetensorsFile file_;
};

// Texts in the slots of a model.
class Texts {
 public:
  Texts(FamilyModel& model, std::int64_t slots, int threads = 2) : model_(model), pool_(threads) {
    model.make_slots(slots);
    for (std::int64_t slot = 0; slot < slots; ++slot) model.clear(slot);
    tokens_.assign(static_cast<std::size_t>(slots), 0);
  }

  struct Piece {
    std::int64_t slot;
    Ids ids;
    bool decode = false;
  };
  // Advances texts and returns the logits after all ids, text after text.
  std::vector<float> advance(const std::vector<Piece>& pieces, std::vector<Draft>* drafts = nullptr) {
    Ids ids;
    std::vector<TextRun> runs;
    for (const auto& piece : pieces) {
      auto& tokens = tokens_[static_cast<std::size_t>(piece.slot)];
      runs.push_back({piece.slot, tokens, std::ssize(piece.ids), piece.decode});
      if (!piece.decode || piece.ids.size() == 1) tokens += std::ssize(piece.ids);
      ids.insert(ids.end(), piece.ids.begin(), piece.ids.end());
    }
    const std::int64_t rows = std::ssize(ids), vocab = model_.config().vocab_size;
    const auto hidden = hidden_.rows(rows, model_.config().hidden_size);
    model_.advance(ids, runs, hidden, pool_, drafts);
    std::vector<float> logits(static_cast<std::size_t>(rows * vocab));
    model_.logits(hidden, View<float, 2>::contiguous(logits.data(), {rows, vocab}), pool_);
    return logits;
  }
  void accept(const Draft& draft, std::int64_t tokens) {
    model_.accept(draft, tokens, pool_);
    tokens_[static_cast<std::size_t>(draft.run.slot)] += tokens;
  }
  // Lets a slot continue after this many tokens.
  void set_tokens(std::int64_t slot, std::int64_t tokens) { tokens_[static_cast<std::size_t>(slot)] = tokens; }

 private:
  FamilyModel& model_;
  ThreadPool pool_;
  RowBuffer hidden_;
  std::vector<std::int64_t> tokens_;
};

Ids part_of(const Ids& ids, std::int64_t begin, std::int64_t end) { return {ids.begin() + begin, ids.begin() + end}; }

void append(std::vector<float>& to, const std::vector<float>& more) { to.insert(to.end(), more.begin(), more.end()); }

constexpr double kTolerance = 2e-5;  // of the largest logit
// What a model that amplifies rounding may differ by, in units of the error that the reference has where it rounds the
// results of its operations to float32. Sums in float32 round more often.
constexpr double kAmplified = 4.0;
// transformers computes the goldens in float32, further from the reference in float64 than this library.
constexpr double kGoldenTolerance = 4e-5;

// Returns the id of the largest of the last `vocab` logits.
std::int32_t likeliest(const std::vector<float>& logits, std::int64_t vocab) {
  return static_cast<std::int32_t>(std::max_element(logits.end() - vocab, logits.end()) - (logits.end() - vocab));
}

// Compares the logits of a text with the reference's in float64.
void expect_close(const std::vector<float>& got, const Numbers& expected, const Ids& ids, const fs::path& folder) {
  double allowed = kTolerance;
  const double difference = worst_difference(got, expected);
  if (!(difference < allowed)) {
    const FamilyReference in_float32(folder, Rounding::float32);
    allowed = std::max(allowed, kAmplified * worst_difference(in_float32.logits(ids), expected));
  }
  EXPECT_LT(difference, allowed);
}

// Checks the logits of three texts as a whole, in pieces, token by token and in a batch of three lengths, of a model
// and of the reference in its folder.
void check_logits(FamilyModel& model, const fs::path& folder, const std::array<Ids, 3>& all) {
  const FamilyReference reference(folder);
  const std::int64_t vocab = model.config().vocab_size;
  std::array<std::vector<float>, 3> whole;
  for (std::size_t text = 0; text < 3; ++text) {
    SCOPED_TRACE("text " + std::to_string(text));
    const Ids& ids = all[text];
    const auto expected = reference.logits(ids);
    whole[text] = Texts(model, 1).advance({{0, ids}});
    expect_close(whole[text], expected, ids, folder);

    Texts pieces(model, 1, 1);
    std::vector<float> in_pieces, by_token;
    for (std::int64_t begin = 0; begin < std::ssize(ids); begin += kCutTokens) {
      append(in_pieces, pieces.advance({{0, part_of(ids, begin, std::min(begin + kCutTokens, std::ssize(ids)))}}));
    }
    EXPECT_EQ(in_pieces, whole[text]);

    Texts tokens(model, 1);
    for (const auto id : ids) append(by_token, tokens.advance({{0, {id}, true}}));
    expect_close(by_token, expected, ids, folder);
  }
  const auto together = Texts(model, 3).advance({{0, all[0]}, {1, all[1]}, {2, all[2]}});
  auto at = together.begin();
  for (const auto& alone : whole) {
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), at)) << "in a batch";
    at += std::ssize(alone);
  }
  EXPECT_EQ(std::ssize(together), (std::ssize(all[0]) + std::ssize(all[1]) + std::ssize(all[2])) * vocab);
}

// Continues a prompt with the likeliest tokens. After every token the text moves to another slot and back, by its state
// or by a copy that shares its pages.
Ids greedy(FamilyModel& model, const Ids& prompt, std::size_t count) {
  const std::int64_t vocab = model.config().vocab_size;
  Texts texts(model, 2);
  auto logits = texts.advance({{0, prompt}});
  Ids drawn;
  for (std::int64_t tokens = std::ssize(prompt); drawn.size() < count; ++tokens) {
    drawn.push_back(likeliest(logits, vocab));
    if (drawn.size() % 2 == 0) {
      const auto state = model.state(0, tokens);
      model.clear(0);
      model.set(0, state);
    } else {
      model.copy(0, 1, tokens);
      texts.set_tokens(1, tokens);
      texts.advance({{1, {1}, true}});  // writes into a page of its own
      model.drop(1);
    }
    logits = texts.advance({{0, {drawn.back()}, true}});
  }
  return drawn;
}

// Checks that a draft has the bits of decode steps, and that its text goes on from the accepted tokens alone.
void check_drafts(FamilyModel& model, const Ids& ids) {
  const std::int64_t begin = std::ssize(ids) - 6;
  Texts texts(model, 2);
  for (std::int64_t slot = 0; slot < 2; ++slot) texts.advance({{slot, part_of(ids, 0, begin)}});
  std::vector<Draft> drafts;
  const auto drafted = texts.advance({{1, part_of(ids, begin, begin + 5), true}}, &drafts);
  ASSERT_EQ(drafts.size(), 1U);
  texts.accept(drafts[0], 3);
  std::vector<float> steps;
  for (std::int64_t i = begin; i < begin + 5; ++i) {
    if (i == begin + 3) {
      EXPECT_EQ(*model.state(1, i).constant, *model.state(0, i).constant);
    }
    append(steps, texts.advance({{0, part_of(ids, i, i + 1), true}}));
  }
  EXPECT_EQ(drafted, steps);
}

class FamilyGoldens : public testing::TestWithParam<const char*> {};

TEST_P(FamilyGoldens, LogitsAndTokensOfTransformers) {
  if (!fs::exists(kGoldens)) GTEST_SKIP() << "no hybrid-goldens in " << EFLA_SHARED_DATA;
  const auto folder = kGoldens / GetParam();
  FamilyModel model(folder, WeightType::float32);
  const FamilyReference reference(folder);
  const Golden golden(folder);
  const std::int64_t vocab = model.config().vocab_size;
  const std::array<Ids, 3> texts{golden.ids("input_ids", 0), golden.ids("input_ids", 1), golden.ids("input_ids", 2)};
  for (std::int64_t text = 0; text < 3; ++text) {
    const auto all = reference.logits(texts[static_cast<std::size_t>(text)]);
    std::vector<double> some;
    for (std::int64_t row = 0; row * vocab < std::ssize(all); row += kScoredEvery) {
      some.insert(some.end(), all.begin() + row * vocab, all.begin() + (row + 1) * vocab);
    }
    EXPECT_LT(worst_difference(golden.logits(text), some), kGoldenTolerance);
  }
  check_logits(model, folder, {texts[0], part_of(texts[1], 0, 113), part_of(texts[2], 0, 64)});
  check_drafts(model, part_of(texts[0], 0, 67));
  const auto expected = golden.ids("greedy");
  EXPECT_EQ(greedy(model, golden.ids("prompt"), expected.size()), expected);
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyGoldens, testing::Values("qwen3_5_text", "olmo_hybrid"),
                         [](const auto& info) { return std::string(info.param); });

Ids random_ids(std::int64_t count, std::int64_t vocab, std::uint64_t seed) {
  Random random(seed);
  Ids ids;
  while (std::ssize(ids) < count)
    ids.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(vocab))));
  return ids;
}

// Checks a model of random weights, in a folder as `nested` and `narrow` say, against the reference.
void check_random_model(const nlohmann::json& config, const std::string& prefix, std::uint64_t seed, bool nested,
                        bool narrow) {
  SCOPED_TRACE(config.dump());
  const test::TempFolder folder;
  write_family_folder(folder.path(), config, random_family_tensors(config, prefix, seed), nested, narrow);
  FamilyModel model(folder.path(), WeightType::float32);
  const std::int64_t vocab = config["vocab_size"];
  check_logits(model, folder.path(),
               {random_ids(140, vocab, seed), random_ids(1, vocab, seed + 1), random_ids(67, vocab, seed + 2)});
  check_drafts(model, random_ids(67, vocab, seed + 3));
  EXPECT_LT(FamilyModel(folder.path(), WeightType::int8).weight_bytes(), model.weight_bytes());
  EXPECT_LE(FamilyModel(folder.path(), WeightType::int4).weight_bytes(),
            FamilyModel(folder.path(), WeightType::int8).weight_bytes());
}

class RandomFamilies : public testing::TestWithParam<int> {};

// Odd numbers of heads, irregular lists of layers, tied heads and not, all prefixes, both element types.
TEST_P(RandomFamilies, LogitsOfTheReference) {
  const auto seed = static_cast<std::uint64_t>(GetParam());
  const bool olmo = seed % 3 == 2, nested = !olmo && seed % 2 == 0;
  const char* prefixes[]{"model.language_model.", "model.", "language_model.model.", "language_model."};
  check_random_model(random_family_config(olmo, seed), olmo ? "model." : prefixes[seed / 3 % 4], seed, nested,
                     seed % 4 == 1);
}

// The head's keys and values are those of a text that went through prompts, decode steps and a rejected draft.
TEST(DraftHeads, DraftWhatTheReferenceDrafts) {
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const auto config = seed < 8 ? random_family_config(false, seed) : random_expert_config(seed % 2 == 1, seed);
    SCOPED_TRACE(config.dump());
    auto tensors = random_family_tensors(config, "model.", seed);
    add_draft_head(tensors, config);
    const test::TempFolder folder;
    write_family_folder(folder.path(), config, tensors, false, false);
    FamilyModel model(folder.path(), WeightType::float32, KeyValueType::float32, true);
    EXPECT_EQ(model.skipped_tensors(), 0);
    const Ids ids = random_ids(72, config["vocab_size"], seed);
    Texts texts(model, 2);
    ThreadPool pool(1);
    texts.advance({{0, part_of(ids, 0, 66)}});
    model.draft(0, 66, ids[66], 5, pool);
    texts.advance({{0, {ids[66]}, true}});
    std::vector<Draft> drafts;
    texts.advance({{0, {ids[67], ids[68], ids[69], 1, 2}, true}}, &drafts);
    texts.accept(drafts[0], 3);
    const auto expected = FamilyReference(folder.path()).drafts(part_of(ids, 0, 71), 7);
    EXPECT_EQ(model.draft(0, 70, ids[70], 7, pool), expected);
    const auto state = model.state(0, 70);
    model.set(1, state);
    EXPECT_EQ(model.draft(1, 70, ids[70], 7, pool), expected);
  }
}

TEST(DraftHeads, OtherThanOneLayerIsRefused) {
  const auto config = random_family_config(false, 1);
  auto tensors = random_family_tensors(config, "model.", 1);
  const test::TempFolder folder;
  const auto load = [&](bool draft_head) {
    write_family_folder(folder.path(), config, tensors, false, false);
    const FamilyModel model(folder.path(), WeightType::float32, KeyValueType::float32, draft_head);
    return model.skipped_tensors();
  };
  test::expect_error([&] { load(true); }, "draft_head", "mtp.");
  add_draft_head(tensors, config);
  tensors.add("mtp.layers.1.input_layernorm.weight", {config["hidden_size"].get<std::int64_t>()}, 1.0);
  EXPECT_GT(load(false), 0);
  test::expect_bad_content([&] { load(true); }, -1, "mtp.layers.1.input_layernorm.weight");
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomFamilies, testing::Range(0, 40));

class RandomExperts : public testing::TestWithParam<int> {};

// Packed projections and not, experts in all layers, some or none, in tensors of their own and together.
TEST_P(RandomExperts, LogitsOfTheReference) {
  const auto seed = static_cast<std::uint64_t>(GetParam());
  const bool next = seed % 2 == 1, nested = !next && seed % 4 == 0;
  check_random_model(random_expert_config(next, seed), nested ? "model.language_model." : "model.", seed, nested,
                     seed % 3 == 1);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomExperts, testing::Range(0, 40));

}  // namespace
}  // namespace efla::nn
