// The model of inference against the model of training, and that a text's bits depend on nothing but the text.
#include "efla/nn/inference/inference_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "tests/support/expect_error.h"

namespace efla::nn {
namespace {

using Ids = std::vector<std::int32_t>;

LanguageModel small_model(const std::string& mixer) {
  LanguageModelConfig config;
  config.mixer = mixer;
  config.vocab_size = 50;
  config.hidden_size = 24;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.num_v_heads = mixer == "gdn" ? 4 : 0;
  config.intermediate_size = 20;
  config.initializer_range = 0.3;
  return LanguageModel(config, Initialiser(5));
}

Ids random_ids(std::int64_t count, std::uint64_t seed) {
  Random random(seed);
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(static_cast<std::int32_t>(random.below(50)));
  return ids;
}

// A text in progress: pieces of a prompt, and single tokens that are decoded.
struct Piece {
  Ids ids;
  bool decode = false;
};

class Texts {
 public:
  Texts(InferenceModel& model, std::int64_t slots, int threads)
      : model_(model), states_(slots, model.state_floats()), pool_(threads), tokens_(slots) {
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      for (auto& value : states_.slot(slot)) value = std::numeric_limits<float>::quiet_NaN();
    }
  }
  void begin(std::int64_t slot) {
    for (auto& value : states_.slot(slot)) value = 0.0F;
  }

  // Returns the logits of each piece, whose i-th goes to slots[i]; decoded ones come first.
  std::vector<std::vector<float>> advance(const std::vector<Piece>& pieces, const std::vector<std::int64_t>& slots) {
    Ids ids;
    std::vector<TextRun> runs;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const auto count = static_cast<std::int64_t>(pieces[i].ids.size());
      runs.push_back({slots[i], tokens_[slots[i]], count, pieces[i].decode});
      tokens_[slots[i]] += count;
      ids.insert(ids.end(), pieces[i].ids.begin(), pieces[i].ids.end());
    }
    const auto rows = static_cast<std::int64_t>(ids.size()), width = model_.config().hidden_size;
    std::vector<float> hidden(rows * width), logits(rows * 50);
    model_.advance(ids, runs, states_, View<float, 2>::contiguous(hidden.data(), {rows, width}), pool_, &drafts_);
    model_.logits(View<float, 2>::contiguous(hidden.data(), {rows, width}),
                  View<float, 2>::contiguous(logits.data(), {rows, 50}), pool_);
    std::vector<std::vector<float>> each;
    auto at = logits.begin();
    for (const auto& piece : pieces) {
      each.emplace_back(at, at + static_cast<std::ptrdiff_t>(piece.ids.size() * 50));
      at += static_cast<std::ptrdiff_t>(piece.ids.size() * 50);
    }
    return each;
  }
  // Advances the text of the call's only draft by its first tokens, of which advance has counted all.
  void accept(std::int64_t slot, std::int64_t drafted, std::int64_t tokens) {
    model_.accept(drafts_.front(), tokens, states_, pool_);
    tokens_[slot] -= drafted - tokens;
  }
  std::span<float> state(std::int64_t slot) { return states_.slot(slot); }

 private:
  InferenceModel& model_;
  StatePool states_;
  ThreadPool pool_;
  std::vector<std::int64_t> tokens_;
  std::vector<Draft> drafts_;
};

double largest_difference(const std::vector<float>& got, const torch::Tensor& expected) {
  const auto flat = expected.contiguous().flatten();
  EXPECT_EQ(static_cast<std::int64_t>(got.size()), flat.numel());
  double largest = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double want = flat[static_cast<std::int64_t>(i)].item<float>();
    largest = std::max(largest, std::abs(got[i] - want) / (1.0 + std::abs(want)));
  }
  return largest;
}

torch::Tensor tensor_of(const Ids& ids) {
  return torch::tensor(std::vector<std::int64_t>(ids.begin(), ids.end()), torch::kLong).unsqueeze(0);
}

class InferenceOfMixer : public testing::TestWithParam<std::string> {};

TEST_P(InferenceOfMixer, AgreesWithTheModelOfTraining) {
  const auto model = small_model(GetParam());
  InferenceModel inference(model, WeightType::float32);
  Texts texts(inference, 2, 1);
  texts.begin(1);
  auto state = model.initial_state(1);
  const auto ids = random_ids(71, 1);
  const auto first = Ids(ids.begin(), ids.begin() + 64), rest = Ids(ids.begin() + 64, ids.end());
  const auto expected = model.logits(tensor_of(ids)).squeeze(0);
  model.prefill(tensor_of(ids), state);
  EXPECT_LT(largest_difference(texts.advance({{first}}, {1})[0], expected.slice(0, 0, 64)), 2e-4);
  EXPECT_LT(largest_difference(texts.advance({{rest}}, {1})[0], expected.slice(0, 64)), 2e-4);
  for (const std::int32_t id : {7, 30}) {
    const auto next = model.step(torch::tensor({static_cast<std::int64_t>(id)}), state);
    EXPECT_LT(largest_difference(texts.advance({{{id}, true}}, {1})[0], next), 2e-4);
  }
  // The parts of the state have the names and shapes of the other model's files.
  const auto tensors = state.tensors();
  const auto parts = inference.state_parts();
  ASSERT_EQ(parts.size(), tensors.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].name, tensors[i].first);
    EXPECT_EQ(at::IntArrayRef(parts[i].shape), tensors[i].second.sizes());
    const auto part = texts.state(1).subspan(parts[i].offset, parts[i].floats);
    EXPECT_LT(largest_difference({part.begin(), part.end()}, tensors[i].second), 2e-4) << parts[i].name;
  }
}

TEST_P(InferenceOfMixer, DraftsHaveTheBitsOfDecodeSteps) {
  const auto model = small_model(GetParam());
  for (const auto type : {WeightType::float32, WeightType::int8}) {
    InferenceModel inference(model, type);
    for (std::int64_t drafted = 2; drafted <= kMostDecoded; drafted += 3) {
      for (std::int64_t right = 1; right <= drafted; ++right) {
        Texts texts(inference, 3, 2);
        const auto prompt = random_ids(70, 2), ids = random_ids(drafted, 3), other = random_ids(5, 4);
        for (std::int64_t slot = 0; slot < 3; ++slot) texts.begin(slot);
        texts.advance({{prompt}, {prompt}}, {0, 1});
        std::vector<float> single;
        std::vector<float> state;
        for (std::int64_t i = 0; i < drafted; ++i) {
          const auto logits = texts.advance({{{ids[i]}, true}}, {0})[0];
          single.insert(single.end(), logits.begin(), logits.end());
          if (i + 1 == right) state.assign(texts.state(0).begin(), texts.state(0).end());
        }
        // Beside a decoded token and a prompt.
        EXPECT_EQ(texts.advance({{{7}, true}, {ids, true}, {other}}, {0, 1, 2})[1], single);
        texts.accept(1, drafted, right);
        EXPECT_TRUE(std::equal(state.begin(), state.end(), texts.state(1).begin())) << right << " of " << drafted;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Mixers, InferenceOfMixer,
                         testing::Values("deltanet", "deltanet-neg", "efla", "efla-adaptive", "efla-loose", "gdn",
                                         "efla-gdn", "kda", "efla-kda", "linear", "gdn2", "gdn2-exact", "comba",
                                         "comba-exact", "deltaproduct-neg", "gated-deltaproduct"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

// exp(A_log) overflows and the softplus underflows: no state decays, as with a rate of almost 0.
TEST(InferenceModel, ARateThatOverflowsTimesASoftplusThatUnderflowsIsNoDecay) {
  const auto ids = random_ids(40, 4);
  for (const char* mixer : {"gdn", "kda", "gdn2", "comba"}) {
    auto model = small_model(mixer);
    const auto logits = [&](double a_log) {
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : model.named_parameters()) {
        torch::Tensor value = parameter.value();
        if (parameter.key().ends_with("A_log")) value.fill_(a_log);
        if (parameter.key().ends_with("dt_bias")) value.fill_(-200);
      }
      InferenceModel inference(model, WeightType::float32);
      Texts texts(inference, 1, 1);
      texts.begin(0);
      return std::pair(model.logits(tensor_of(ids)), texts.advance({{ids}}, {0})[0]);
    };
    const auto expected = logits(-100), got = logits(89);
    EXPECT_TRUE(expected.first.isfinite().all().item<bool>()) << mixer;
    EXPECT_TRUE(torch::equal(got.first, expected.first)) << mixer;
    EXPECT_EQ(got.second, expected.second) << mixer;
  }
}

// One text alone, and the same text beside others, cut elsewhere, on more threads.
TEST(InferenceModel, ATextHasTheSameBitsWhateverIsBesideIt) {
  for (const std::string mixer : {"efla", "kda", "gdn", "gdn2", "comba", "gated-deltaproduct"}) {
    const auto model = small_model(mixer);
    for (const auto type : {WeightType::float32, WeightType::bfloat16, WeightType::int8, WeightType::int4}) {
      InferenceModel inference(model, type);
      const auto ids = random_ids(150, 2);
      Texts alone(inference, 1, 1);
      alone.begin(0);
      auto whole = alone.advance({{ids}}, {0})[0];
      const auto step = alone.advance({{{3}, true}}, {0})[0];
      const auto after = alone.advance({{random_ids(100, 9)}}, {0})[0];  // a second prompt, from an odd place

      Texts beside(inference, 13, 2);
      for (std::int64_t slot = 0; slot < 13; ++slot) beside.begin(slot);
      std::vector<Piece> pieces;
      std::vector<std::int64_t> slots;
      for (std::int32_t slot = 0; slot < 9; ++slot) {
        pieces.push_back({{slot}, true});
        slots.push_back(slot);
      }
      const auto with = [&](const Ids& piece, bool decode) {
        auto all = pieces;
        auto where = slots;
        all.insert(decode ? all.begin() : all.end(), {piece, decode});
        where.insert(decode ? where.begin() : where.end(), 11);
        if (!decode) {
          all.push_back({random_ids(5, 4)});
          where.push_back(12);
        }
        return beside.advance(all, where)[decode ? 0 : 9];
      };
      auto cut = with(Ids(ids.begin(), ids.begin() + 64), false);
      for (const auto& [begin, end] : {std::pair{64, 128}, std::pair{128, 150}}) {
        const auto piece = with(Ids(ids.begin() + begin, ids.begin() + end), false);
        cut.insert(cut.end(), piece.begin(), piece.end());
      }
      EXPECT_EQ(cut, whole) << mixer << name_of(type);
      EXPECT_EQ(with({3}, true), step) << mixer << name_of(type);
      // The text has 151 tokens: cut at 192.
      const auto second = random_ids(100, 9);
      auto two = with(Ids(second.begin(), second.begin() + 41), false);
      const auto last = with(Ids(second.begin() + 41, second.end()), false);
      two.insert(two.end(), last.begin(), last.end());
      EXPECT_EQ(two, after) << mixer << name_of(type);
      EXPECT_EQ(std::memcmp(alone.state(0).data(), beside.state(11).data(), alone.state(0).size_bytes()), 0);
    }
  }
}

TEST(PackedWeight, StoresWhatItsTypeHolds) {
  const auto weight = torch::randn({7, 130});
  EXPECT_TRUE(PackedWeight({weight}, WeightType::float32).widened().equal(weight));
  EXPECT_TRUE(
      PackedWeight({weight}, WeightType::bfloat16).widened().equal(weight.to(torch::kBFloat16).to(torch::kFloat)));
  const auto bytes = PackedWeight({weight, 2.0 * weight}, WeightType::int8);
  EXPECT_EQ(bytes.outputs(), 14);
  EXPECT_EQ(bytes.bytes(), 14 * 130 + 14 * 3 * sizeof(float));
  for (std::int64_t begin = 0; begin < 130; begin += kScaleBlock) {
    const auto block = weight.slice(1, begin, begin + kScaleBlock);
    const auto error = (bytes.widened().slice(0, 0, 7).slice(1, begin, begin + kScaleBlock) - block).abs();
    EXPECT_TRUE(error.le(block.abs().amax(1, true) * (0.5001 / 127)).all().item<bool>());
  }
  EXPECT_TRUE(PackedWeight({torch::zeros({1, 3})}, WeightType::int8).widened().equal(torch::zeros({1, 3})));
  for (const float units : {1.0F, 63.0F, 64.0F, 190.0F, 1000.0F}) {  // denormals
    const float largest = units * std::numeric_limits<float>::denorm_min();
    const auto denormal = largest * torch::tensor({{1.0F, -1.0F, 0.0F}});
    const auto error = (PackedWeight({denormal}, WeightType::int8).widened() - denormal).abs().max().item<float>();
    EXPECT_LE(error, largest / 127.0F + std::numeric_limits<float>::denorm_min()) << units;
    EXPECT_LT(error, largest) << units;
  }
}

// A product with a weight that is not finite is not finite with any type, so that a reply says it.
TEST(PackedWeight, KeepsThatAWeightIsNotFinite) {
  for (const float lost : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    auto weight = torch::ones({1, 64});
    weight[0][3] = lost;
    for (const auto type : {WeightType::float32, WeightType::bfloat16, WeightType::int8, WeightType::int4}) {
      const PackedWeight packed({weight}, type);
      EXPECT_FALSE(std::isfinite(packed.widened()[0][3].item<float>())) << name_of(type) << ' ' << lost;
    }
  }
}

// The largest magnitude becomes −8 scales, the others multiples from −8 to 7, so that only numbers of the other sign
// are further from a multiple than half a scale, at most a whole one. The scale is a float16.
TEST(PackedWeight, HasFourBitsInBlocks) {
  const auto weight = torch::randn({7, 160});
  const PackedWeight four({weight, 2.0 * weight}, WeightType::int4);
  EXPECT_EQ(four.bytes(), 14 * 5 * 18);
  const auto blocks = weight.reshape({7, 5, 32}), got = four.widened().slice(0, 0, 7).reshape({7, 5, 32});
  const auto scale = blocks.abs().amax(2, true) / 8.0;
  EXPECT_TRUE((got - blocks).abs().le(scale * 1.001).all().item<bool>());
  EXPECT_LT(((got - blocks) / scale).square().mean().item<double>(), 0.11);  // of rounding alone 1/12
  EXPECT_TRUE(PackedWeight({torch::zeros({1, 32})}, WeightType::int4).widened().equal(torch::zeros({1, 32})));
  EXPECT_TRUE(PackedWeight({torch::full({1, 32}, 1e30)}, WeightType::int4).widened().isfinite().all().item<bool>());
  const auto uneven = torch::randn({3, 33});
  EXPECT_TRUE(
      PackedWeight({uneven}, WeightType::int4).widened().equal(PackedWeight({uneven}, WeightType::int8).widened()));
}

// ‖got − expected‖ / ‖expected‖. The largest difference of a logit is no measure where a model amplifies rounding at
// some tokens, which the processor and its BLAS decide.
double relative_difference(const std::vector<float>& got, const torch::Tensor& expected) {
  const auto want = expected.contiguous().flatten().to(torch::kDouble);
  const auto have = torch::tensor(got).to(torch::kDouble);
  return ((have - want).norm() / want.norm()).item<double>();
}

TEST(InferenceModel, ComputesWithTheWeightsOfItsType) {
  for (const bool tied : {false, true}) {
    for (const auto type : {WeightType::bfloat16, WeightType::int8, WeightType::int4}) {
      LanguageModelConfig config = small_model("gdn").config();
      config.tie_word_embeddings = tied;
      LanguageModel model(config, Initialiser(5));
      InferenceModel inference(model, type);
      Texts texts(inference, 1, 1);
      texts.begin(0);
      const auto ids = random_ids(40, 3);
      const auto got = texts.advance({{ids}}, {0})[0];
      EXPECT_GT(relative_difference(got, model.logits(tensor_of(ids)).squeeze(0)), 1e-3);
      round_weights(model, type);
      EXPECT_LT(relative_difference(got, model.logits(tensor_of(ids)).squeeze(0)), 1e-4);
    }
  }
}

TEST(InferenceModel, RefusesModelsWithoutAStateOfConstantSize) {
  LanguageModelConfig config;
  config.vocab_size = 8;
  config.hidden_size = 8;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.attention_layers = {1};
  const LanguageModel hybrid(config, Initialiser(1));
  test::expect_error([&] { InferenceModel(hybrid, WeightType::float32); }, "model", "softmax attention");
  EXPECT_EQ(parse_weight_type("int8"), WeightType::int8);
  EXPECT_EQ(parse_weight_type("int4"), WeightType::int4);
  test::expect_error([] { parse_weight_type("int2"); }, "weights", "float32, bfloat16, int8 or int4");
}

}  // namespace
}  // namespace efla::nn
