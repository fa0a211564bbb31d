// The language model: decoding, packed documents, the loss, states and bad configurations.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "efla/autograd/layers/cross_entropy.h"
#include "efla/nn/models/language_model.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/nn/named_tensor.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/torch_tensors.h"

namespace efla::nn {
namespace {

using test::expect_bad_content;
using test::expect_error;
using test::max_difference;
using test::random_tensor;
using torch::Tensor;

constexpr std::int64_t kVocabulary = 61;

LanguageModelConfig small(const std::string& mixer) {
  LanguageModelConfig config{.mixer = mixer, .vocab_size = kVocabulary, .hidden_size = 32, .num_hidden_layers = 2};
  config.num_heads = 2;
  config.intermediate_size = 48;
  config.initializer_range = 0.2;  // large enough for every part to show in the logits
  return config;
}

LanguageModelConfig hybrid() {
  LanguageModelConfig config = small("efla");
  config.attention_layers = {1};
  config.attention_heads = 4;
  config.attention_kv_heads = 2;
  return config;
}

// Every preset, and models with parts that the presets do not have.
std::vector<std::pair<std::string, LanguageModelConfig>> models() {
  std::vector<std::pair<std::string, LanguageModelConfig>> all;
  for (const auto& preset : mixer_presets()) all.emplace_back(preset.name, small(std::string(preset.name)));
  all.emplace_back("hybrid", hybrid());
  auto grouped = small("gdn");
  grouped.num_v_heads = 4;
  grouped.head_dim = 8;
  grouped.expand_v = 2.0;
  all.emplace_back("grouped values", grouped);
  auto plain = small("deltanet");
  plain.use_short_conv = plain.use_beta = plain.use_output_norm = false;
  plain.use_gate = true;
  all.emplace_back("without parts", plain);
  auto activation = small("deltanet");
  activation.qk_activation = "elu";
  activation.qk_norm = "sum";
  all.emplace_back("elu and sum", activation);
  auto product = small("gated-deltaproduct");
  product.num_householder = 3;
  product.num_v_heads = 4;
  product.allow_neg_eigval = true;
  all.emplace_back("three steps", product);
  product.num_v_heads = 0;
  all.emplace_back("three steps as in flash-linear-attention", product);
  return all;
}

Tensor random_ids(at::IntArrayRef sizes, std::uint64_t seed) {
  return (random_tensor(sizes, seed).abs() * 1000).to(torch::kLong).remainder(kVocabulary);
}

Tensor lengths_to_ends(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> ends{0};
  for (const auto length : lengths) ends.push_back(ends.back() + length);
  return torch::tensor(ends, torch::kLong);
}

TEST(LanguageModel, DecodesWhatItPredictsWholeForEveryMixer) {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, config] : models()) {
    SCOPED_TRACE(name);
    const LanguageModel model(config, Initialiser(5));
    const auto ids = random_ids({2, 75}, 1);
    const auto expected = model.logits(ids);
    ASSERT_GT(expected.std().item<double>(), 0.1);  // the logits say something

    auto state = model.initial_state(2);
    std::vector<Tensor> parts{model.prefill(ids.slice(1, 0, 33), state).unsqueeze(1),
                              model.prefill(ids.slice(1, 33, 70), state).unsqueeze(1)};
    for (std::int64_t t = 70; t < 75; ++t) parts.push_back(model.step(ids.select(1, t), state).unsqueeze(1));
    EXPECT_EQ(state.tokens, 75);
    const auto wanted = torch::cat({expected.slice(1, 32, 33), expected.slice(1, 69, 75)}, 1);
    EXPECT_LE(max_difference(torch::cat(parts, 1), wanted), 2e-5 * expected.abs().max().item<double>());

    auto token_by_token = model.initial_state(2);
    for (std::int64_t t = 0; t < 75; ++t) model.step(ids.select(1, t), token_by_token);
    EXPECT_LE(max_difference(model.step(ids.select(1, 0), token_by_token), model.step(ids.select(1, 0), state)),
              2e-5 * expected.abs().max().item<double>());
  }
}

TEST(LanguageModel, PrefillsPackedSequencesAsEachAlone) {
  const torch::NoGradGuard no_grad;
  const std::vector<std::int64_t> lengths{1, 40, 2, 3, 64, 33};
  const auto ends = lengths_to_ends(lengths);
  for (const auto& [name, config] : models()) {
    SCOPED_TRACE(name);
    const LanguageModel model(config, Initialiser(5));
    const auto ids = random_ids({1, 143}, 1), next = random_ids({6}, 2);
    auto state = model.initial_state(6);
    if (mixer_preset(config.mixer).softmax || !config.attention_layers.empty()) {
      expect_error([&] { model.advance_packed(ids, ends, state); }, "cu_seqlens", "softmax attention");
      continue;
    }
    // The second call continues the sequences with the lengths in reverse order.
    const std::vector<std::int64_t> more_lengths(lengths.rbegin(), lengths.rend());
    const auto more_ends = lengths_to_ends(more_lengths);
    const auto more_ids = random_ids({1, 143}, 3);
    model.advance_packed(ids, ends, state);
    const auto hidden = model.advance_packed(more_ids, more_ends, state)[0];
    const auto logits = model.logits_of(hidden.index_select(0, more_ends.slice(0, 1) - 1));
    EXPECT_EQ(state.tokens, 0);
    for (std::int64_t n = 0; n < 6; ++n) {
      auto alone = model.initial_state(1), packed = state.row(n, lengths[n] + more_lengths[n]);
      EXPECT_EQ(packed.tokens, lengths[n] + more_lengths[n]);
      const auto part_of = [n](const Tensor& all, const Tensor& all_ends) {
        return all.slice(1, all_ends[n].item<std::int64_t>(), all_ends[n + 1].item<std::int64_t>());
      };
      const auto expected = model.prefill(torch::cat({part_of(ids, ends), part_of(more_ids, more_ends)}, 1), alone);
      const auto expect_same = [n](const Tensor& got, const Tensor& wanted) {
        EXPECT_LE(((got - wanted).norm() / wanted.norm()).item<double>(), 2e-5) << n;
      };
      expect_same(logits[n].unsqueeze(0), expected);
      for (int step = 0; step < 2; ++step) {
        expect_same(model.step(next.slice(0, n, n + 1), packed), model.step(next.slice(0, n, n + 1), alone));
      }
    }
  }
}

TEST(LanguageModel, PackedDocumentsAreAsTheyAreAlone) {
  const std::vector<std::int64_t> lengths{1, 40, 2, 3, 64, 33};
  const auto ends = lengths_to_ends(lengths);
  for (const auto& [name, config] : models()) {
    SCOPED_TRACE(name);
    // With weights of seed 5 rounding errors of the model "grouped values" are much larger.
    const LanguageModel model(config, Initialiser(6));
    const auto ids = random_ids({1, 143}, 1), targets = random_ids({1, 143}, 2);
    const auto packed = model.logits(ids, ends);
    const double tolerance = 2e-5 * packed.abs().max().item<double>();
    const auto parameters = model.parameters();
    const auto gradients = torch::autograd::grad({model.loss(ids, targets, ends)}, parameters);
    const auto more_ends = torch::cat({ends, torch::full({2}, 143, torch::kLong)});  // of documents without tokens
    EXPECT_TRUE(torch::equal(model.loss(ids, targets, more_ends), model.loss(ids, targets, ends)));

    Tensor loss = torch::zeros({});
    for (std::size_t n = 0; n < lengths.size(); ++n) {
      const auto document = [&](const Tensor& t) {
        return t.slice(1, ends[static_cast<std::int64_t>(n)].item<std::int64_t>(),
                       ends[static_cast<std::int64_t>(n) + 1].item<std::int64_t>());
      };
      EXPECT_LE(max_difference(document(packed), model.logits(document(ids))), tolerance) << "document " << n;
      loss = loss + model.loss(document(ids), document(targets)) * static_cast<double>(lengths[n]) / 143.0;
    }
    const auto alone = torch::autograd::grad({loss}, parameters);
    const auto names = model.named_parameters().keys();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_LE(max_difference(gradients[i], alone[i]), 2e-4 * std::max(1e-2, alone[i].abs().max().item<double>()))
          << names[i];
    }
  }
}

TEST(LanguageModel, AnEarlierDocumentChangesNoBitOfALaterOne) {
  const torch::NoGradGuard no_grad;
  const auto ends = lengths_to_ends({37, 50});
  for (const auto& [name, config] : models()) {
    SCOPED_TRACE(name);
    const LanguageModel model(config, Initialiser(5));
    const auto ids = random_ids({1, 87}, 1);
    auto others = ids.clone();
    others.slice(1, 0, 37).copy_(random_ids({1, 37}, 9));
    EXPECT_TRUE(torch::equal(model.logits(ids, ends).slice(1, 37, 87), model.logits(others, ends).slice(1, 37, 87)));
  }
}

TEST(LanguageModel, LossIsTheMeanCrossEntropyOfItsLogits) {
  const LanguageModel model(small("efla"), Initialiser(5));
  const auto ids = random_ids({2, 40}, 1);
  auto targets = random_ids({2, 40}, 2);
  targets.slice(1, 7, 12).fill_(kIgnoreIndex);
  const auto loss = model.loss(ids, targets);
  const auto expected = torch::nn::functional::cross_entropy(model.logits(ids).flatten(0, 1), targets.flatten());
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
  const auto gradients = torch::autograd::grad({3.0 * loss}, model.parameters());
  const auto wanted = torch::autograd::grad({3.0 * expected}, model.parameters());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_LE(max_difference(gradients[i], wanted[i]), 1e-5 * std::max(1.0, wanted[i].abs().max().item<double>()));
  }
  EXPECT_EQ(model.loss(ids, torch::full_like(ids, kIgnoreIndex)).item<double>(), 0.0);
}

// A vocabulary so large that the rows of one call are more than one slice.
TEST(CrossEntropy, SlicesGiveTheSumOfTheirParts) {
  const std::int64_t vocabulary = 1 << 18;
  const auto x = random_tensor({40, 3}, 1).to(torch::kFloat).requires_grad_(true);
  const auto weight = random_tensor({vocabulary, 3}, 2).to(torch::kFloat).requires_grad_(true);
  const auto targets = torch::arange(40) * 6000;
  const auto loss = autograd::linear_cross_entropy(x, weight, targets);
  const auto expected = torch::nn::functional::cross_entropy(torch::matmul(x, weight.t()), targets);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5);
  const auto gradients = torch::autograd::grad({loss}, {x, weight});
  const auto wanted = torch::autograd::grad({expected}, {x, weight});
  for (std::size_t i = 0; i < 2; ++i) EXPECT_LE(max_difference(gradients[i], wanted[i]), 1e-6) << i;
}

// Numbers of tokens for which products without gradients go other ways (autograd/linear.h).
TEST(LanguageModel, RecomputationChangesNoBit) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  for (const auto& [config, tokens] : {std::pair{small("gdn"), 5}, {small("gdn"), 70}, {hybrid(), 300}}) {
    LanguageModel model(config, Initialiser(5));
    const auto ids = random_ids({1, tokens}, 1), targets = random_ids({1, tokens}, 2);
    const auto ends = lengths_to_ends({3, tokens - 3});
    const auto parameters = model.parameters();
    const auto loss = model.loss(ids, targets, ends);
    const auto gradients = torch::autograd::grad({loss}, parameters);
    model.set_recompute(true);
    const auto again = model.loss(ids, targets, ends);
    EXPECT_TRUE(torch::equal(loss, again));
    const auto recomputed = torch::autograd::grad({again}, parameters);
    for (std::size_t i = 0; i < gradients.size(); ++i) EXPECT_TRUE(torch::equal(gradients[i], recomputed[i])) << i;
  }
  at::set_num_threads(threads);
}

// Has more tokens than a prefill computes at a time.
TEST(LanguageModel, PrefillInPartsGoesOnWhereItWas) {
  const torch::NoGradGuard no_grad;
  auto config = hybrid();
  config.hidden_size = 8;
  config.num_heads = 1;
  config.attention_heads = config.attention_kv_heads = 1;
  const LanguageModel model(config, Initialiser(5));
  const auto ids = random_ids({1, 2500}, 1);
  auto state = model.initial_state(1);
  const auto last = model.prefill(ids, state);
  EXPECT_LE(max_difference(last, model.logits(ids).select(1, 2499)), 1e-4);
}

void save(const std::filesystem::path& path, const LanguageModelState& state) {
  const auto tensors = state.tensors();
  std::vector<io::NamedTensor> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back(named_tensor(name, tensor));
  io::write_safetensors(path, entries);
}

LanguageModelState::Reader reader_of(const io::SafetensorsFile& file) {
  return [&file](const std::string& name, at::IntArrayRef shape) { return read_tensor(file, name, shape); };
}

TEST(LanguageModel, StateIsOfConstantSizeAndSurvivesAFile) {
  const test::TempFolder folder;
  const LanguageModel model(small("gdn"), Initialiser(5)), with_attention(hybrid(), Initialiser(5));
  const auto ids = random_ids({2, 40}, 1);
  auto state = model.initial_state(2);
  // 2 layers of memory [2, 2, 16, 16] and 3 inputs of 96 channels.
  EXPECT_EQ(state.bytes(), 2 * 4 * (2 * 2 * 16 * 16 + 2 * 3 * 96));
  model.prefill(ids, state);
  EXPECT_EQ(state.bytes(), 2 * 4 * (2 * 2 * 16 * 16 + 2 * 3 * 96));

  for (const auto* each : {&model, &with_attention}) {
    auto before = each->initial_state(2), after = each->initial_state(2);
    each->prefill(ids, before);
    save(folder / "state", before);
    const io::SafetensorsFile saved(folder / "state");
    after.read(reader_of(saved), 40);
    EXPECT_EQ(after.tokens, 40);
    auto copy = before.clone();
    const auto expected = each->step(ids.select(1, 3), before);
    EXPECT_TRUE(torch::equal(each->step(ids.select(1, 3), after), expected));
    EXPECT_TRUE(torch::equal(each->step(ids.select(1, 3), copy), expected));
  }
  auto other = model.initial_state(2);
  const io::SafetensorsFile file(folder / "state");
  expect_bad_content([&] { other.read(reader_of(file), 40); }, -1, "has no tensor layers.1.memory");
  auto one = with_attention.initial_state(1);
  expect_bad_content([&] { one.read(reader_of(file), 40); }, -1, "[2, ");
  EXPECT_EQ(one.tokens, 0);
}

TEST(LanguageModel, HasItsParametersByName) {
  auto config = small("kda");
  const LanguageModel model(config, Initialiser(1));
  const auto p = model.named_parameters();
  const auto sizes = [&](const char* name) { return p[name].sizes().vec(); };
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(sizes("model.embeddings.weight"), Sizes({kVocabulary, 32}));
  EXPECT_EQ(sizes("model.layers.1.attn_norm.weight"), Sizes({32}));
  EXPECT_EQ(sizes("model.layers.1.attn.q_conv1d.weight"), Sizes({32, 1, 4}));
  EXPECT_EQ(sizes("model.layers.1.attn.f_proj.0.weight"), Sizes({16, 32}));
  EXPECT_EQ(sizes("model.layers.1.attn.g_proj.1.bias"), Sizes({32}));
  EXPECT_EQ(sizes("model.layers.1.attn.dt_bias"), Sizes({32}));
  EXPECT_EQ(sizes("model.layers.1.mlp.down_proj.weight"), Sizes({32, 48}));
  EXPECT_EQ(sizes("model.norm.weight"), Sizes({32}));
  EXPECT_EQ(sizes("lm_head.weight"), Sizes({kVocabulary, 32}));
  EXPECT_NEAR(p["model.layers.0.mlp.up_proj.weight"].std().item<double>(), 0.2, 0.01);

  config.tie_word_embeddings = true;
  const LanguageModel tied(config, Initialiser(1));
  EXPECT_FALSE(tied.named_parameters().contains("lm_head.weight"));
  EXPECT_EQ(tied.parameter_count(), model.parameter_count() - kVocabulary * 32);
}

TEST(LanguageModel, PresetsAreOfTheirSize) {
  const auto parameters = [](const char* name) {  // not a page of the large ones is touched
    return LanguageModel(language_model_preset(name), Initialiser::open()).parameter_count();
  };
  EXPECT_EQ(parameters("efla-1m"), 1'090'176);  // as docs/checkpoints.md lists them
  EXPECT_EQ(parameters("efla-20m"), 20'918'272);
  EXPECT_EQ(parameters("efla-340m"), 341'594'112);
  EXPECT_EQ(parameters("efla-1.3b"), 1'365'677'056);
  expect_error([] { language_model_preset("efla-1b"); }, "preset", "nearest: efla-1m");
}

TEST(LanguageModel, AModelOfAttentionAloneNeedsNoSizesOfAMixer) {
  LanguageModelConfig config;
  config.mixer = "softmax";
  config.vocab_size = 32;
  config.hidden_size = 40;  // not a multiple of the mixer's 16 heads
  config.num_hidden_layers = 1;
  config.attention_heads = 10;
  EXPECT_EQ(LanguageModel(config, Initialiser(1)).logits(torch::zeros({1, 3}, torch::kLong)).size(2), 32);
}

TEST(LanguageModel, ConfigurationSurvivesJson) {
  for (const auto& [name, config] : models()) {
    SCOPED_TRACE(name);
    const auto json = to_json(config);
    const auto read = language_model_config_from_json({json, io::refuse_argument("config.json")});
    EXPECT_EQ(to_json(read), json);
    const LanguageModel a(config, Initialiser(1)), b(read, Initialiser(1));
    const auto ids = random_ids({1, 9}, 1);
    EXPECT_TRUE(torch::equal(a.logits(ids), b.logits(ids)));
  }
  EXPECT_EQ(to_json(small("deltanet"))["model_type"], "delta_net");
  EXPECT_EQ(to_json(small("gdn"))["model_type"], "gated_deltanet");
  EXPECT_EQ(to_json(small("kda"))["model_type"], "kda");
  EXPECT_EQ(to_json(small("comba"))["model_type"], "comba");
  EXPECT_EQ(to_json(small("deltaproduct"))["model_type"], "gated_deltaproduct");
  EXPECT_EQ(to_json(small("gated-deltaproduct"))["model_type"], "gated_deltaproduct");
  EXPECT_EQ(to_json(small("deltaproduct-exact"))["model_type"], "efla");
  auto grouped = small("gated-deltaproduct");
  grouped.num_v_heads = 4;
  EXPECT_EQ(to_json(grouped)["model_type"], "efla");
  EXPECT_EQ(to_json(small("gdn2"))["model_type"], "efla");
  EXPECT_EQ(to_json(small("efla-loose"))["model_type"], "efla");
}

TEST(LanguageModel, LeastParametersAreThoseOfTheLargeWeights) {
  for (const auto& [name, config] : models()) {
    std::int64_t large = 0;
    for (const auto& parameter : LanguageModel(config, Initialiser(1)).named_parameters()) {
      for (const char* weight : {"embeddings", "lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                                 "attn.q_proj", "attn.r_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj"}) {
        if (parameter.key().ends_with(std::string(weight) + ".weight")) large += parameter.value().numel();
      }
    }
    EXPECT_EQ(config.least_parameters(), static_cast<double>(large)) << name;
  }
}

TEST(LanguageModel, TableOverridesItsPreset) {
  const auto read = [](const nlohmann::json& table) {
    return language_model_config_from_table({table, io::refuse_argument("lm.toml"), "model"});
  };
  const auto config = read({{"preset", "efla-20m"},
                            {"mixer", "kda"},
                            {"hidden_size", 256},
                            {"num_heads", 4},
                            {"attn", {{"layers", {0, 3}}}}});
  EXPECT_EQ(config.mixer, "kda");
  EXPECT_EQ(config.hidden_size, 256);
  EXPECT_EQ(config.num_hidden_layers, language_model_preset("efla-20m").num_hidden_layers);
  EXPECT_EQ(config.attention_layers, (std::vector<std::int64_t>{0, 3}));
  expect_error([&] { read({{"hiden_size", 256}}); }, "model.hiden_size", "nearest: model.hidden_size");
  expect_error([&] { read({{"preset", "efla-21m"}}); }, "model.preset", "lm.toml: model.preset: got 'efla-21m'");
  expect_error([&] { read({{"num_heads", 0}}); }, "model.num_heads", "lm.toml: model.num_heads: got 0");
}

TEST(LanguageModel, NamesWhatIsWrong) {
  const auto wrong = [](const std::string& argument, const std::string& says, auto&& change) {
    auto config = small("efla");
    change(config);
    expect_error([&] { LanguageModel(config, Initialiser(1)); }, argument, says);
  };
  wrong("mixer", "nearest: efla", [](auto& c) { c.mixer = "elfa"; });
  wrong("vocab_size", "got 0", [](auto& c) { c.vocab_size = 0; });
  wrong("num_heads", "got 3, expected a divisor of hidden_size = ", [](auto& c) { c.num_heads = 3; });
  wrong("expand_k", "whole key dim", [](auto& c) { c.expand_k = 0.3; });
  wrong("num_v_heads", "multiple of num_heads", [](auto& c) { c.num_v_heads = 3; });
  wrong("conv_size", "got 9", [](auto& c) { c.conv_size = 9; });
  wrong("allow_neg_eigval", "efla has no step of Euler's", [](auto& c) { c.allow_neg_eigval = true; });
  wrong("qk_norm", "efla takes q and k as they are", [](auto& c) { c.qk_norm = "l2"; });
  wrong("safe_gate", "no decay by channel", [](auto& c) { c.safe_gate = true; });
  wrong("num_householder", "efla has one step per token", [](auto& c) { c.num_householder = 2; });
  wrong("v_low_rank_dim", "efla has no such projections", [](auto& c) { c.v_low_rank_dim = 32; });
  wrong("attn.layers", "layers from 0 to 1", [](auto& c) { c.attention_layers = {2}; });
  wrong("attn.num_heads", "divides hidden", [](auto& c) { c.attention_layers = {0}, c.attention_heads = 5; });
  wrong("eos_token_id", "below vocab_size", [](auto& c) { c.eos_token_id = {1, kVocabulary}; });
  for (const double eps : {0.0, -1e-5, 1e-60, 1.5, 1e308, std::numeric_limits<double>::quiet_NaN()}) {
    wrong("norm_eps", "positive", [=](auto& c) { c.norm_eps = eps; });
  }

  const LanguageModel model(small("efla"), Initialiser(1));
  const auto ids = random_ids({1, 8}, 1);
  auto too_large = ids.clone();
  too_large[0][5] = kVocabulary;
  expect_error([&] { model.logits(too_large); }, "ids", "token 61, expected 0 to 60");
  expect_error([&] { model.logits(ids[0]); }, "ids", "int64 [B, T]");
  expect_error([&] { model.loss(ids, too_large); }, "targets", "61");
  expect_error([&] { model.loss(ids, ids.slice(1, 0, 7)); }, "targets", "[1, 7]");
  expect_error([&] { model.logits(ids, torch::tensor({0, 5, 7}, torch::kLong)); }, "cu_seqlens", "the last at 8");
  expect_error(
      [&] {
        model.logits(ids.expand({2, 8}), torch::tensor({0, 8}, torch::kLong));
      },
      "cu_seqlens", "a batch of 2");
  auto state = model.initial_state(2);
  expect_error([&] { model.prefill(ids, state); }, "state", "one of 2 sequences");
}

// What PretrainedConfig.to_dict() of transformers 4 adds, with its defaults, and what unsloth adds.
TEST(LanguageModel, ConfigJsonMayHaveTheFieldsOfTransformers4) {
  const auto defaults = nlohmann::json::parse(R"({
    "return_dict": true, "output_hidden_states": false, "output_attentions": false, "torchscript": false,
    "torch_dtype": "bfloat16", "use_bfloat16": false, "tf_legacy_loss": false, "pruned_heads": {},
    "chunk_size_feed_forward": 0, "is_encoder_decoder": false, "is_decoder": false,
    "cross_attention_hidden_size": null, "add_cross_attention": false, "tie_encoder_decoder": false,
    "max_length": 20, "min_length": 0, "do_sample": false, "early_stopping": false, "num_beams": 1,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": null, "num_return_sequences": 1, "output_scores": false, "return_dict_in_generate": false,
    "forced_bos_token_id": null, "forced_eos_token_id": null, "remove_invalid_values": false,
    "exponential_decay_length_penalty": null, "suppress_tokens": null, "begin_suppress_tokens": null,
    "architectures": ["DeltaNetForCausalLM"], "finetuning_task": null, "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "tokenizer_class": "LlamaTokenizer", "prefix": null,
    "pad_token_id": -1, "sep_token_id": null, "decoder_start_token_id": null, "task_specific_params": null,
    "problem_type": null, "_name_or_path": "a/b", "transformers_version": "4.51.3", "unsloth_version": "2025.3.19",
    "unsloth_fixed": true})");
  auto json = to_json(small("deltanet"));
  json.update(defaults);
  const auto config = language_model_config_from_json({json, io::refuse_argument("config.json")});
  EXPECT_EQ(config.pad_token_id, std::nullopt);
  EXPECT_EQ(to_json(config), to_json(small("deltanet")));
}

TEST(LanguageModel, ConfigJsonNamesWhatIsNotSupported) {
  const auto wrong = [](const std::string& argument, const std::string& says, const nlohmann::json& change) {
    auto json = to_json(small("deltanet"));
    json.update(change);
    expect_error([&] { language_model_config_from_json({json, io::refuse_argument("config.json")}); }, argument, says);
  };
  wrong("model_type", "got \"mamba2\", expected delta_net", {{"model_type", "mamba2"}});
  wrong("hidden_act", "\"swish\" or \"silu\", all that is supported", {{"hidden_act", "gelu"}});
  wrong("pruned_heads", "expected {} or null, all that is supported", {{"pruned_heads", {{"0", {1}}}}});
  wrong("attnres_block_size", "got 4", {{"attnres_block_size", 4}});
  wrong("hidden_sizes", "nearest: hidden_size", {{"hidden_sizes", 64}});
  wrong("hidden_size", "a whole number", {{"hidden_size", "64"}});
  wrong("hidden_size", "got 9223372036854775808, expected a whole number below 2^63",
        {{"hidden_size", std::uint64_t{1} << 63}});
  wrong("attn.layers", "a list of whole numbers below 2^63",
        {{"attn", {{"layers", {std::uint64_t{1} << 63}}, {"num_heads", 2}}}});
  wrong("num_heads", "config.json: num_heads: got 0", {{"num_heads", 0}});
  wrong("num_v_heads", "got 3, expected a multiple of num_heads, 2",
        {{"model_type", "efla"}, {"mixer", "efla"}, {"num_heads", 2}, {"num_v_heads", 3}});
  wrong("safe_gate", "expected false, as efla has no decay by channel",
        {{"model_type", "efla"}, {"mixer", "efla"}, {"safe_gate", true}});
  wrong("attn.num_heads", "got 3, expected a number whose double divides hidden_size",
        {{"attn", {{"layers", {0}}, {"num_heads", 3}}}});
  wrong("attn.num_kv_heads", "got 3, expected a divisor of the number of heads, 2",
        {{"attn", {{"layers", {0}}, {"num_heads", 2}, {"num_kv_heads", 3}}}});
  wrong("attn.num_heads", "got -2, expected a positive number", {{"attn", {{"layers", {0}}, {"num_heads", -2}}}});
  wrong("attn.num_kv_heads", "got -1, expected a positive number",
        {{"attn", {{"layers", {0}}, {"num_heads", 2}, {"num_kv_heads", -1}}}});
  wrong("attn.window_size", "got 512", {{"attn", {{"layers", {0}}, {"num_heads", 2}, {"window_size", 512}}}});
  wrong("attn.qk_norm", "got true, expected false or null",
        {{"attn", {{"layers", {0}}, {"num_heads", 2}, {"qk_norm", true}}}});
}

TEST(LanguageModel, ConfigJsonMayNameWhatItsAttentionHasNot) {
  auto config = small("deltanet");
  config.attention_layers = {0};
  auto json = to_json(config);
  for (const char* name : {"qkv_bias", "qk_norm"}) json["attn"][name] = false;
  json["attn"]["window_size"] = nullptr;
  EXPECT_EQ(to_json(language_model_config_from_json({json, io::refuse_argument("config.json")})), to_json(config));
}

TEST(LanguageModel, ConfigJsonSaysNothingWithNull) {
  auto json = to_json(small("deltanet"));
  for (const char* name : {"rope_scaling", "use_l2warp", "hidden_act", "norm_eps"}) json[name] = nullptr;
  EXPECT_EQ(to_json(language_model_config_from_json({json, io::refuse_argument("config.json")})),
            to_json(small("deltanet")));
}

// flash-linear-attention 0.6 writes the activation of the output gate into every config.json of this type.
TEST(LanguageModel, ConfigJsonOfGatedDeltaNetNamesItsOutputGate) {
  auto json = to_json(small("gdn"));
  const auto read = [&json](const char* activation) {
    json["output_gate_activation"] = activation;
    return language_model_config_from_json({json, io::refuse_argument("config.json")});
  };
  EXPECT_EQ(to_json(read("swish")), to_json(small("gdn")));
  EXPECT_EQ(to_json(read("silu")), to_json(small("gdn")));
  expect_error([&] { read("sigmoid"); }, "output_gate_activation", "got \"sigmoid\", expected \"swish\" or \"silu\"");
}

}  // namespace
}  // namespace efla::nn
