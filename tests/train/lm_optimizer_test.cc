// The parts of a language model's training step: AdamW over flat buffers, sums of gradients, options and rates.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "efla/train/flat_parameters.h"
#include "efla/train/gradient_sum.h"
#include "efla/train/tasks/lm_options.h"
#include "tests/support/expect_error.h"
#include "tests/train/lm_stand_in.h"

namespace efla::train {
namespace {

using nlohmann::json;
using test::expect_error;
using test::values_of;

torch::Tensor random_tensor(std::vector<std::int64_t> shape, std::uint64_t seed) {
  Random random(seed);
  torch::Tensor tensor = torch::empty(shape);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.data_ptr<float>()[i] = static_cast<float>(random.normal());
  return tensor;
}

nn::NamedParameters some_parameters() {
  return {{"embeddings.weight", random_tensor({300, 200}, 1)},
          {"norm.weight", random_tensor({200}, 2)},
          {"attn.A_log", random_tensor({4, 1}, 3)},
          {"attn.dt_bias", random_tensor({4}, 4)},
          {"q_conv1d.weight", random_tensor({40, 1, 4}, 5)},
          {"lm_head.weight", random_tensor({70, 200}, 6)},
          {"positions", random_tensor({3, 2}, 7)}};
}

TEST(FlatParameters, AreTheModelsParameters) {
  const auto parameters = some_parameters(), copy = some_parameters();
  const FlatParameters flat(parameters, torch::kCPU);
  flat.share(copy);
  EXPECT_EQ(flat.size(), 300 * 200 + 200 + 4 + 4 + 160 + 70 * 200 + 6);
  EXPECT_TRUE(torch::equal(parameters[0].second, random_tensor({300, 200}, 1)));
  flat.values().fill_(3.0);
  EXPECT_EQ(parameters[4].second.sum().item<float>(), 480.0F);
  EXPECT_EQ(copy[4].second.sum().item<float>(), 480.0F);
  const std::vector<bool> decays{true, false, false, false, true, true, false};
  for (std::size_t i = 0; i < decays.size(); ++i) EXPECT_EQ(flat.entries()[i].decays, decays[i]) << i;
}

TEST(FlatAdamW, IsPyTorchsAdamW) {
  const auto parameters = some_parameters(), reference = some_parameters();
  const FlatParameters flat(parameters, torch::kCPU);
  ThreadPool pool(2);
  FlatAdamW adamw(flat, {0.9, 0.95, 1e-8, 0.1}, {0, flat.size()});
  std::vector<torch::Tensor> decaying, others;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    (flat.entries()[i].decays ? decaying : others).push_back(reference[i].second.requires_grad_(true));
  }
  const auto options = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(1e-2).betas({0.9, 0.95}).eps(1e-8).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decaying, options(0.1));
  groups.emplace_back(others, options(0.0));
  torch::optim::AdamW theirs(std::move(groups), *options(0.1));
  for (int step = 1; step <= 5; ++step) {
    const double lr = 1e-2 / step;
    const torch::Tensor gradient = random_tensor({flat.size()}, 100 + static_cast<std::uint64_t>(step));
    adamw.step(gradient, 0.5, lr, pool);
    for (auto& group : theirs.param_groups()) group.options().set_lr(lr);
    for (std::size_t i = 0; i < reference.size(); ++i) {
      torch::Tensor parameter = reference[i].second;
      parameter.mutable_grad() = flat.view(gradient * 0.5, flat.entries()[i]).clone();
    }
    theirs.step();
  }
  EXPECT_EQ(adamw.steps(), 5);
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double error = (reference[i].second - parameters[i].second).abs().max().item<double>();
    EXPECT_LE(error, 2e-6) << flat.entries()[i].name;
  }
}

TEST(FlatAdamW, InPartsAndOnAnyThreadsHasTheSameBits) {
  const auto whole = some_parameters(), parts = some_parameters();
  const FlatParameters flat_whole(whole, torch::kCPU), flat_parts(parts, torch::kCPU);
  ThreadPool one(1), three(3);
  const torch::Tensor gradient = random_tensor({flat_whole.size()}, 7);
  FlatAdamW adamw(flat_whole, {}, {0, flat_whole.size()});
  FlatAdamW first(flat_parts, {}, {0, 60100}), second(flat_parts, {}, {60100, flat_parts.size()});
  for (int step = 0; step < 3; ++step) {
    adamw.step(gradient, 1.0, 1e-3, one);
    first.step(gradient, 1.0, 1e-3, three);
    second.step(gradient, 1.0, 1e-3, three);
  }
  EXPECT_TRUE(torch::equal(flat_whole.values(), flat_parts.values()));
  EXPECT_TRUE(torch::equal(adamw.exp_avg_sq().narrow(0, 60100, 100), second.exp_avg_sq().narrow(0, 0, 100)));
  const double norm = sum_of_squares(gradient, {0, gradient.numel()}, one).item<double>();
  EXPECT_EQ(norm, sum_of_squares(gradient, {0, gradient.numel()}, three).item<double>());
  EXPECT_NEAR(norm, gradient.to(torch::kFloat64).square().sum().item<double>(), 1e-9 * norm);
}

TEST(GradientBuckets, CoverEveryOwnersPartFromTheEnd) {
  std::vector<std::pair<std::int64_t, std::int64_t>> found;
  for (const auto& bucket : gradient_buckets({0, 10, 10, 25}, 8)) found.emplace_back(bucket.begin, bucket.end);
  const std::vector<std::pair<std::int64_t, std::int64_t>> expected{{17, 25}, {10, 17}, {2, 10}, {0, 2}};
  EXPECT_EQ(found, expected);
}

// Adds the gradients of eight micro-batches in an order of its own, from several threads.
std::vector<float> sum_in_order(const FlatParameters& flat, std::uint64_t order_seed, int threads,
                                std::vector<std::size_t>& ready) {
  constexpr std::int64_t kMicroBatches = 8;
  GradientSum sum(flat, gradient_buckets({0, 30000, flat.size()}, 9000), [&](std::size_t b) { ready.push_back(b); });
  for (int step = 0; step < 2; ++step) {  // nothing of a step stays for the next
    ready.clear();
    sum.begin(kMicroBatches);
    std::vector<std::pair<std::size_t, std::int64_t>> adds;
    for (std::size_t p = 0; p < flat.entries().size(); ++p) {
      for (std::int64_t m = 0; m < kMicroBatches; ++m) adds.emplace_back(p, m);
    }
    Random random(order_seed);
    for (std::size_t i = adds.size(); i > 1; --i) {
      std::swap(adds[i - 1], adds[random.below(static_cast<std::uint32_t>(i))]);
    }
    ThreadPool pool(threads);
    pool.run(static_cast<std::int64_t>(adds.size()), [&](std::int64_t i, int) {
      const auto [p, m] = adds[i];
      if (p == 1 && m != 3) return sum.add(p, m, {});  // a parameter that one micro-batch alone uses
      if (p == 3) return sum.add(p, m, {});            // and one that none does
      sum.add(p, m, random_tensor(flat.entries()[p].shape, 1000 * p + static_cast<std::uint64_t>(m)));
    });
  }
  return values_of(sum.gradient());
}

TEST(GradientSum, HasTheSameBitsInAnyOrder) {
  const FlatParameters flat(some_parameters(), torch::kCPU);
  std::vector<std::size_t> ready;
  const auto expected = sum_in_order(flat, 1, 1, ready);
  for (std::uint64_t seed = 2; seed < 6; ++seed) {
    EXPECT_EQ(sum_in_order(flat, seed, seed % 2 == 0 ? 1 : 3, ready), expected);
    std::vector<std::size_t> in_order(ready.size());
    for (std::size_t i = 0; i < ready.size(); ++i) in_order[i] = i;
    EXPECT_EQ(ready, in_order);
    EXPECT_EQ(ready.size(), 9U);
  }
  const auto& unused = flat.entries()[3].range;
  for (std::int64_t i = unused.begin; i < unused.end; ++i) EXPECT_EQ(expected[i], 0.0F);
  torch::Tensor lone = random_tensor({200}, 1003);
  const auto& range = flat.entries()[1].range;
  EXPECT_EQ(std::vector<float>(expected.begin() + range.begin, expected.begin() + range.end), values_of(lone));
}

LmOptions options_of(const json& config) { return lm_options_from_json({config, io::refuse_argument("lm.toml")}); }

json small_config() {
  return {{"data", {{"train", "shards"}}},
          {"training",
           {{"sequence_length", 16}, {"tokens_per_step", 64}, {"steps", 10}, {"warmup_steps", 2}, {"lr", 1e-3}}}};
}

TEST(LmOptions, AreReadAndWritten) {
  const auto options = options_of(small_config());
  EXPECT_EQ(options.data.train, "shards");
  EXPECT_EQ(options.training.sequence_length, 16);
  EXPECT_EQ(options.training.seed, 42U);
  EXPECT_EQ(to_json(options_of(to_json(options))), to_json(options));
  auto by_tokens = small_config();
  by_tokens["training"].erase("steps");
  by_tokens["training"]["tokens"] = 650;
  EXPECT_EQ(options_of(by_tokens).training.total_steps(), 11);
}

TEST(LmOptions, MistakesAreNamed) {
  const auto refused = [](const std::string& table, const std::string& key, const json& value,
                          const std::string& argument, const std::string& says) {
    auto config = small_config();
    config[table][key] = value;
    expect_error([&] { options_of(config); }, argument, says);
  };
  refused("training", "warm_up_steps", 1, "training.warm_up_steps", "nearest: training.warmup_steps");
  refused("data", "trian", "x", "data.trian", "nearest: data.train");
  refused("trainig", "x", 1, "trainig", "nearest: training");
  for (const auto& [key, full] : {std::pair{"lr", "training.lr"}, {"validation", "data.validation"}}) {
    auto config = small_config();
    config[key] = 1;
    expect_error([&] { options_of(config); }, key, std::string("nearest: ") + full);
  }
  refused("training", "lr", "high", "training.lr", "a number");
  refused("training", "steps", 1.5, "training.steps", "a whole number");
  refused("training", "tokens", 5, "training.steps", "expected 0 or none, because training.tokens is 5");
  refused("training", "tokens_per_step", 65, "training.tokens_per_step", "multiple");
  refused("training", "warmup_steps", 10, "training.warmup_steps", "below the number of steps");
  refused("training", "min_lr", 1, "training.min_lr", "0 to lr");
  refused("training", "evaluate_every", 1, "training.evaluate_every", "no data.validation");
  refused("training", "sample_every", 1, "training.sample_every", "no data.tokenizer");
  refused("training", "eps", 1e-60, "training.eps", "above 0 and at most 1 in float32");
  refused("training", "precision", "fp8", "training.precision", "float32 or bfloat16");
  expect_error([] { options_of({{"training", {{"steps", 2}, {"warmup_steps", 0}}}}); }, "data.train", "a folder");
}

TEST(LearningRate, RisesFromTheFloorAndFallsToIt) {
  LmTrainOptions options;
  options.steps = 110;
  options.warmup_steps = 10;
  options.lr = 1.0;
  options.min_lr = 0.1;
  const LearningRate rate = learning_rate(options);
  EXPECT_DOUBLE_EQ(rate.at(0), 0.19);
  EXPECT_DOUBLE_EQ(rate.at(9), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(10), 1.0);
  EXPECT_NEAR(rate.at(60), 0.55, 1e-12);
  EXPECT_NEAR(rate.at(109), 0.1, 1e-3);
  EXPECT_GT(rate.at(109), 0.1);
}

}  // namespace
}  // namespace efla::train
