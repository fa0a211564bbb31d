// Softmax attention: the layer, the mixer and the cache of keys and values.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <cmath>
#include <map>
#include <string>

#include "efla/nn/layers/attention.h"
#include "efla/nn/layers/block.h"
#include "efla/torch/autocast.h"
#include "efla/torch/context.h"
#include "tests/nn/parameters_of.h"
#include "tests/support/expect_error.h"
#include "tests/support/torch_tensors.h"

namespace efla::nn {
namespace {

using test::max_difference;
using test::random_tensor;
using torch::Tensor;

// More queries than are computed at a time, and two query heads to each key.
TEST(Attention, IsSoftmaxOverRotatedKeys) {
  const Attention attention({.hidden = 16, .heads = 4, .key_value_heads = 2, .rope_theta = 100.0}, Initialiser(1));
  const auto p = parameters_of(attention);
  const std::int64_t tokens = 300;
  const auto x = random_tensor({1, tokens, 16}, 1).to(torch::kFloat).requires_grad_(true);
  // Elements (0, 2) and (1, 3) of a head turn by t and t / 10.
  const auto rotated = [&](const Tensor& y) {
    std::vector<Tensor> parts(4);
    for (std::int64_t i = 0; i < 2; ++i) {
      const auto angle = (torch::arange(tokens) * (i == 0 ? 1.0 : 0.1)).unsqueeze(-1);
      const auto a = y.select(-1, i), b = y.select(-1, i + 2);
      parts[i] = a * angle.cos() - b * angle.sin();
      parts[i + 2] = a * angle.sin() + b * angle.cos();
    }
    return torch::stack(parts, -1);
  };
  const auto heads = [&](const char* name) { return x[0].matmul(p.at(name).t()).unflatten(1, {-1, 4}); };
  const auto q = rotated(heads("q_proj.weight")), k = rotated(heads("k_proj.weight")), v = heads("v_proj.weight");
  const auto mask = torch::full({tokens, tokens}, -INFINITY).triu(1);
  std::vector<Tensor> outputs;
  for (std::int64_t h = 0; h < 4; ++h) {
    const auto scores = q.select(1, h).matmul(k.select(1, h / 2).t()) / 2 + mask;
    outputs.push_back(torch::softmax(scores, -1).matmul(v.select(1, h / 2)));
  }
  const auto expected = torch::cat(outputs, 1).matmul(p.at("o_proj.weight").t()).unsqueeze(0);
  const auto y = attention.forward(x);
  EXPECT_LE(max_difference(y, expected), 1e-5);
  const auto weight = random_tensor(y.sizes(), 9).to(torch::kFloat);
  const auto gradient = torch::autograd::grad({(y * weight).sum()}, {x})[0];
  EXPECT_LE(max_difference(gradient, torch::autograd::grad({(expected * weight).sum()}, {x})[0]), 1e-4);
}

// Few heads and many tokens, for which kernels that are not reproducible split the keys and add by atomic operations.
TEST(Attention, GradientsOnAGpuHaveTheSameBitsTwice) {
  if (!torch::cuda::is_available() || !libtorch::has_gpu_kernels())
    GTEST_SKIP() << "no GPU that LibTorch and the kernels can use";
  Attention attention({.hidden = 256, .heads = 2, .key_value_heads = 1, .rope_theta = 10000.0}, Initialiser(1));
  attention.to(torch::kCUDA);
  const auto x = random_tensor({1, 4096, 256}, 1).to(torch::kCUDA, torch::kFloat).requires_grad_(true);
  const auto dy = random_tensor({1, 4096, 256}, 2).to(torch::kCUDA, torch::kFloat);
  libtorch::compute_reproducibly();
  const auto gradient = [&] {
    const libtorch::ReproducibleOnly reproducible(x.device());
    const auto y = attention.forward(x);
    return torch::autograd::grad({y}, {x}, {dy.to(y.scalar_type())})[0];
  };
  EXPECT_TRUE(torch::equal(gradient(), gradient())) << "float32";
  const libtorch::Bfloat16OnGpu precision;
  EXPECT_TRUE(torch::equal(gradient(), gradient())) << "bfloat16";
}

// Past the first capacity of the cache. Slots that have no token yet must not count.
TEST(Attention, OneTokenAtATimeAttendsToAllBefore) {
  const torch::NoGradGuard no_grad;
  const AttentionConfig config{.hidden = 16, .heads = 4, .key_value_heads = 2, .rope_theta = 100.0};
  const Attention attention(config, Initialiser(1));
  const auto p = parameters_of(attention);
  const std::int64_t tokens = 300;
  const auto x = random_tensor({2, tokens, 16}, 1).to(torch::kFloat);
  const auto qkv =
      torch::matmul(x, torch::cat({p.at("q_proj.weight"), p.at("k_proj.weight"), p.at("v_proj.weight")}).t());
  auto cache = attention.initial_cache(2);
  std::vector<Tensor> outputs;
  for (std::int64_t t = 0; t < tokens; ++t) {
    cache.reserve(1);
    const AttentionStep step(config, torch::tensor({t}, torch::kLong), {}, cache.key_slots().size(2));
    outputs.push_back(attend_one(config, step, qkv.select(1, t), cache));
    cache.count_token();
  }
  EXPECT_GT(cache.key_slots().size(2), tokens);
  const auto o = torch::stack(outputs, 1).matmul(p.at("o_proj.weight").t());
  EXPECT_LE(max_difference(o, attention.forward(x)), 1e-5);
  auto prefilled = attention.initial_cache(2);
  attention.forward(x, prefilled);
  EXPECT_LE(max_difference(cache.keys(), prefilled.keys()), 1e-5);
  EXPECT_LE(max_difference(cache.values(), prefilled.values()), 1e-5);
}

TEST(SoftmaxMixer, IsCausalAttention) {
  const SoftmaxMixer mixer({.mixer = "softmax", .hidden = 16, .heads = 2, .conv = 0, .output_norm = false},
                           Initialiser(1));
  const auto p = parameters_of(mixer);
  const auto x = random_tensor({1, 9, 16}, 1).to(torch::kFloat);
  const auto branch = [&](const char* name) {
    return torch::silu(x.matmul(p.at(std::string(name) + "_proj.weight").t())).view({9, 2, 8});
  };
  const auto q = branch("q"), k = branch("k"), v = branch("v");
  std::vector<Tensor> rows;
  for (std::int64_t t = 0; t < 9; ++t) {
    std::vector<Tensor> heads;
    for (std::int64_t h = 0; h < 2; ++h) {
      const auto weights = torch::softmax(k.narrow(0, 0, t + 1).select(1, h).mv(q[t][h]) / std::sqrt(8.0), 0);
      heads.push_back(weights.matmul(v.narrow(0, 0, t + 1).select(1, h)));
    }
    rows.push_back(torch::cat(heads));
  }
  const auto expected = torch::stack(rows).unsqueeze(0).matmul(p.at("o_proj.weight").t());
  EXPECT_LE(max_difference(mixer.forward(x), expected), 1e-5);
}

TEST(SoftmaxMixer, HasTheParametersOfAMixer) {
  MixerConfig config{.mixer = "softmax", .hidden = 16, .heads = 2, .output_gate = OutputGate::sigmoid};
  const auto p = parameters_of(SoftmaxMixer(config, Initialiser(1)));
  config.mixer = "linear";  // neither has a projection of β
  const auto expected = parameters_of(Mixer(config, Initialiser(1)));
  ASSERT_EQ(p.size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(torch::equal(p.at(name), tensor)) << name;
}

TEST(SoftmaxMixer, NamesWhatIsWrong) {
  const MixerConfig config{.mixer = "softmax", .hidden = 16, .heads = 2};
  const SoftmaxMixer mixer(config, Initialiser(1));
  const auto x = torch::zeros({1, 5, 16});
  test::expect_error(
      [&] {
        mixer.forward(x, torch::tensor({0, 2, 5}, torch::kLong));
      },
      "cu_seqlens", "packed sequences, and softmax");
  EXPECT_TRUE(torch::equal(mixer.forward(x, torch::tensor({0, 5}, torch::kLong)), mixer.forward(x)));
  test::expect_error([&] { Mixer(config, Initialiser(1)); }, "mixer", "got 'softmax', expected a delta rule");
  test::expect_error([&] { SoftmaxMixer({}, Initialiser(1)); }, "mixer", "got 'efla', expected softmax");
  test::expect_error([&] { SoftmaxMixer({.mixer = "softmax", .hidden = 16, .key_dim = 8}, Initialiser(1)); }, "key_dim",
                     "hidden / heads for softmax attention");
}

// So that a text which was prefilled in bfloat16 is decoded in float32.
TEST(KeyValueCache, KeepsItsTypeAsItGrows) {
  KeyValueCache cache(1, 1, 2, torch::kCPU);
  for (const std::int64_t tokens : {3, 4}) {
    const auto keys = torch::ones({1, 1, tokens, 2}, torch::kBFloat16);
    cache.append(keys, 2 * keys);
  }
  EXPECT_EQ(cache.tokens(), 7);
  EXPECT_TRUE(cache.keys().equal(torch::ones({1, 1, 7, 2})));
  EXPECT_TRUE(cache.values().equal(torch::full({1, 1, 7, 2}, 2.0F)));
}

}  // namespace
}  // namespace efla::nn
