// Models of families as a GPU computes them, against a reference in float64 and logits of transformers. Without a GPU
// LibTorch and references compute the same functions on the CPU.
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "efla/io/safetensors/safetensors.h"
#include "efla/nn/families/family_model.h"
#include "efla/nn/families/gpu_family_model.h"
#include "tests/nn/family_reference.h"
#include "tests/nn/random_family.h"
#include "tests/support/temp_folder.h"

namespace efla::nn {
namespace {

namespace fs = std::filesystem;
using WideIds = std::vector<std::int64_t>;
using Logits = std::vector<float>;

constexpr double kGpuTolerance = 5e-5;  // of the largest logit, in float32
constexpr double kNarrowFactor = 1.2;   // of the error of the reference that rounds, in bfloat16

// Texts in the slots of a model.
class GpuTexts {
 public:
  GpuTexts(GpuFamilyModel& model, std::int64_t slots) : model_(model), tokens_(static_cast<std::size_t>(slots)) {
    model.make_slots(slots);
    for (std::int64_t slot = 0; slot < slots; ++slot) model.clear(slot);
  }

  struct Piece {
    std::int64_t slot;
    WideIds ids;
  };
  // Reads pieces of prompts in one call. Returns the logits after all ids.
  Logits read(const std::vector<Piece>& pieces) {
    WideIds ids;
    std::vector<TextRun> runs;
    for (const auto& piece : pieces) {
      auto& tokens = tokens_[static_cast<std::size_t>(piece.slot)];
      runs.push_back({piece.slot, tokens, std::ssize(piece.ids)});
      tokens += std::ssize(piece.ids);
      ids.insert(ids.end(), piece.ids.begin(), piece.ids.end());
    }
    return numbers(model_.logits(model_.read(torch::tensor(ids, torch::kLong).to(model_.device()), runs)));
  }
  // Decodes a token of each entry; slot −1: an entry without a text. Returns the logits of all entries.
  Logits step(const std::vector<Piece>& pieces) {
    WideIds ids;
    std::vector<GpuFamilyModel::Entry> entries;
    for (const auto& piece : pieces) {
      ids.push_back(piece.ids.front());
      entries.push_back({piece.slot, piece.slot < 0 ? 0 : tokens_[static_cast<std::size_t>(piece.slot)]++});
    }
    return numbers(model_.step(torch::tensor(ids, torch::kLong).to(model_.device()), entries).logits);
  }
  void set_tokens(std::int64_t slot, std::int64_t tokens) { tokens_[static_cast<std::size_t>(slot)] = tokens; }
  std::int64_t tokens(std::int64_t slot) const { return tokens_[static_cast<std::size_t>(slot)]; }

 private:
  static Logits numbers(const torch::Tensor& logits) {
    const auto all = logits.to(torch::kCPU).contiguous();
    return {all.data_ptr<float>(), all.data_ptr<float>() + all.numel()};
  }

  GpuFamilyModel& model_;
  std::vector<std::int64_t> tokens_;
};

WideIds slice(const WideIds& ids, std::int64_t begin, std::int64_t end) {
  return {ids.begin() + begin, ids.begin() + end};
}

WideIds drawn_ids(std::int64_t count, std::int64_t vocab, std::uint64_t seed) {
  Random random(seed);
  WideIds ids;
  while (std::ssize(ids) < count) ids.push_back(random.below(static_cast<std::uint32_t>(vocab)));
  return ids;
}

// The logits that are expected after the ids of a text, and the differences from them so far.
class Expected {
 public:
  // narrow: in bfloat16, whose errors are compared with the errors of a reference that rounds as transformers does.
  Expected(const fs::path& folder, const WideIds& ids, std::int64_t vocab, bool narrow)
      : exact_(FamilyReference(folder).logits({ids.begin(), ids.end()})), vocab_(vocab) {
    for (const double x : exact_) largest_ = std::max(largest_, std::abs(x));
    if (narrow) rounded_ = FamilyReference(folder, Rounding::bfloat16).logits({ids.begin(), ids.end()});
  }
  ~Expected() { check(); }
  Expected(const Expected&) = delete;
  Expected& operator=(const Expected&) = delete;

  // Takes the logits after some ids, from number `first` on.
  void take(std::int64_t first, const Logits& got) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto at = static_cast<std::size_t>(first * vocab_) + i;
      const double apart = std::abs(got[i] - exact_[at]);
      worst_ = std::isnan(apart) ? INFINITY : std::max(worst_, apart);
      squares_ += apart * apart;
      if (!rounded_.empty()) allowed_ += std::pow(rounded_[at] - exact_[at], 2);
    }
  }

 private:
  // Checks all that was taken: the largest difference in float32, or the mean square of all in bfloat16.
  void check() const {
    if (rounded_.empty()) {
      EXPECT_LT(worst_, kGpuTolerance * largest_);
    } else {
      EXPECT_LT(std::sqrt(squares_), kNarrowFactor * std::sqrt(allowed_));
    }
  }

  std::vector<double> exact_, rounded_;
  std::int64_t vocab_;
  double largest_ = 0.0, worst_ = 0.0, squares_ = 0.0, allowed_ = 0.0;
};

Logits row_of(const Logits& logits, std::int64_t row, std::int64_t vocab) {
  return {logits.begin() + row * vocab, logits.begin() + (row + 1) * vocab};
}

// The parameters: whether on a GPU, whether the weights have bfloat16, and the seed of a configuration, or −1 and −2
// for folders of transformers.
class GpuFamilies : public testing::TestWithParam<std::tuple<bool, bool, int>> {
 protected:
  void SetUp() override {
    if (std::get<0>(GetParam()) && !torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
    if (std::get<2>(GetParam()) < 0) return use_golden(std::get<2>(GetParam()) == -1 ? "qwen3_5_text" : "olmo_hybrid");
    const auto seed = static_cast<std::uint64_t>(std::get<2>(GetParam()));
    const bool olmo = seed % 3 == 2;
    auto config = random_family_config(olmo, seed);
    config["layer_types"] = {"linear_attention", "full_attention", "linear_attention"};
    config["num_hidden_layers"] = 3;
    SCOPED_TRACE(config.dump());
    write_family_folder(folder.path(), config, random_family_tensors(config, "model.", seed), false, narrow());
    vocab = config["vocab_size"];
    path = folder.path();
  }
  // Takes a folder that transformers has written.
  void use_golden(const char* family) {
    path = fs::path(EFLA_SHARED_DATA) / "hybrid-goldens" / family;
    if (!fs::exists(path)) GTEST_SKIP() << "no hybrid-goldens in " << EFLA_SHARED_DATA;
    vocab = load_family_config(path).vocab_size;
  }
  // Returns ids, other ones for another number, 1 to 3: random ones, or those of the folder's golden.safetensors.
  WideIds ids(std::int64_t count, std::int64_t number) const {
    if (path == folder.path()) return drawn_ids(count, vocab, static_cast<std::uint64_t>(number));
    const io::SafetensorsFile file(path / "golden.safetensors");
    const auto& tensor = *file.find("input_ids");
    WideIds all(static_cast<std::size_t>(count));
    std::memcpy(all.data(), tensor.bytes.data() + (number - 1) * tensor.shape[1] * std::int64_t{sizeof(std::int64_t)},
                all.size() * sizeof(std::int64_t));
    return all;
  }
  bool narrow() const { return std::get<1>(GetParam()); }
  torch::Device device() const { return std::get<0>(GetParam()) ? torch::kCUDA : torch::kCPU; }
  std::unique_ptr<Expected> expected(const WideIds& ids) const {
    return std::make_unique<Expected>(path, ids, vocab, narrow());
  }

  const test::TempFolder folder;
  fs::path path;
  std::int64_t vocab = 0;
};

TEST_P(GpuFamilies, ReadPromptsTogetherInPiecesAndTokenByToken) {
  GpuFamilyModel gpu(path, WeightType::float32, vocab, device());
  const std::array<WideIds, 3> all{ids(140, 1), ids(40, 2), ids(67, 3)};
  const auto together = GpuTexts(gpu, 3).read({{2, all[0]}, {0, all[1]}, {1, all[2]}});
  auto at = together.begin();
  for (const auto& text : all) {
    const auto end = at + std::ssize(text) * vocab;
    expected(text)->take(0, {at, end});
    at = end;
  }
  GpuTexts pieces(gpu, 2);
  const auto in_pieces = expected(all[0]);
  std::int64_t begin = 0;
  for (const std::int64_t end : {1, 3, 64, 66, 140}) {
    in_pieces->take(begin, pieces.read({{1, slice(all[0], begin, end)}}));
    begin = end;
  }
}

TEST_P(GpuFamilies, DecodeTextsOfDifferentLengthsSideBySide) {
  GpuFamilyModel gpu(path, WeightType::float32, vocab, device());
  const std::array<WideIds, 3> all{ids(130, 1), ids(70, 2), ids(140, 3)};
  GpuTexts texts(gpu, 5);
  texts.read({{3, slice(all[0], 0, 60)}, {4, slice(all[2], 0, 70)}});
  const auto first = expected(all[0]), second = expected(all[1]), third = expected(all[2]);
  for (std::int64_t t = 0; t < 70; ++t) {
    const auto token = [&](std::size_t text, std::int64_t begin) {
      return WideIds{all[text][static_cast<std::size_t>(begin + t)]};
    };
    const auto logits = texts.step({{4, token(2, 70)}, {-1, {0}}, {0, token(1, 0)}, {3, token(0, 60)}});
    third->take(70 + t, row_of(logits, 0, vocab));
    second->take(t, row_of(logits, 2, vocab));
    first->take(60 + t, row_of(logits, 3, vocab));
  }
}

TEST_P(GpuFamilies, MoveTextsBetweenSlotsAndTheCpu) {
  GpuFamilyModel gpu(path, WeightType::float32, vocab, device());
  FamilyModel cpu(path, WeightType::float32);
  cpu.make_slots(1);
  const WideIds text = ids(150, 1);
  const auto logits_of = expected(text);
  GpuTexts texts(gpu, 4);
  texts.read({{0, slice(text, 0, 130)}});
  gpu.copy(0, 1, 130);
  texts.set_tokens(1, 130);
  const auto state = gpu.state(0, 130);
  EXPECT_EQ(state.tokens, 130);
  ASSERT_EQ(state.pages.size(), 3U);
  EXPECT_EQ(state.constant->size() * sizeof(float), gpu.constant_bytes());
  const auto again = gpu.state(1, 130);
  EXPECT_EQ(*again.constant, *state.constant);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(again.pages[i] == state.pages[i], i < 2) << i;  // full pages are the same objects
    EXPECT_EQ(*again.pages[i], *state.pages[i]) << i;
  }
  gpu.set(2, state);
  texts.set_tokens(2, 130);
  cpu.set(0, state);
  gpu.set(3, cpu.state(0, 130));
  texts.set_tokens(3, 130);
  texts.step({{1, {0}}});  // writes into a page of its own
  gpu.drop(1);
  for (std::int64_t t = 130; t < 150; ++t) {
    const WideIds token{text[static_cast<std::size_t>(t)]};
    const auto logits = texts.step({{0, token}, {2, token}, {3, token}});
    for (std::int64_t i = 0; i < 3; ++i) logits_of->take(t, row_of(logits, i, vocab));
  }
  EXPECT_EQ(gpu.state(2, 150).pages.front(), state.pages.front());
}

std::string name_of_case(const testing::TestParamInfo<std::tuple<bool, bool, int>>& info) {
  const auto [on_gpu, narrow, seed] = info.param;
  const std::string which = seed == -1 ? "qwen3_5_text" : seed == -2 ? "olmo_hybrid" : std::to_string(seed);
  return std::string(on_gpu ? "OnAGpu" : "OnTheCpu") + (narrow ? "Bfloat16_" : "Float32_") + which;
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuFamilies, testing::Combine(testing::Bool(), testing::Bool(), testing::Range(0, 6)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Goldens, GpuFamilies,
                         testing::Combine(testing::Bool(), testing::Values(false), testing::Values(-1, -2)),
                         name_of_case);

}  // namespace
}  // namespace efla::nn
