// The classifier of images: parameters, pooling and configurations.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <nlohmann/json.hpp>
#include <string>

#include "efla/base/error.h"
#include "efla/nn/models/pixel_classifier.h"
#include "tests/nn/parameters_of.h"
#include "tests/support/torch_tensors.h"

namespace efla::nn {
namespace {

using test::max_difference;

TEST(PixelClassifier, HasItsParametersByName) {
  PixelClassifierConfig config;
  config.layers = 2;
  config.mlp_ratio = 2;
  const PixelClassifier model(config, 1);
  const auto p = parameters_of(model);
  EXPECT_EQ(p.at("layers.1.mixer.q_proj.weight").sizes(), at::IntArrayRef({64, 64}));
  EXPECT_EQ(p.at("layers.0.mixer.k_conv1d.weight").sizes(), at::IntArrayRef({64, 1, 4}));
  EXPECT_EQ(p.at("layers.0.mlp.gate_proj.weight").sizes(), at::IntArrayRef({128, 64}));
  EXPECT_EQ(p.at("positions").sizes(), at::IntArrayRef({784, 64}));
  EXPECT_EQ(model.forward(torch::rand({3, 784})).sizes(), at::IntArrayRef({3, 10}));
  for (const auto& [name, tensor] : p) EXPECT_TRUE(tensor.requires_grad()) << name;
}

TEST(PixelClassifier, LeastParametersAreThoseOfTheLargeWeights) {
  for (const double mlp_ratio : {0.0, 0.001, 2.5}) {
    const PixelClassifierConfig config{.layers = 3, .hidden = 24, .heads = 2, .mlp_ratio = mlp_ratio};
    std::int64_t large = 0;
    for (const auto& [name, tensor] : parameters_of(PixelClassifier(config, 1))) {
      for (const char* weight : {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}) {
        if (name.ends_with(std::string(weight) + ".weight")) large += tensor.numel();
      }
    }
    EXPECT_EQ(config.least_parameters(), static_cast<double>(large)) << mlp_ratio;
  }
}

TEST(PixelClassifier, StartsAlikeInAllPartsThatTwoMixersShare) {
  PixelClassifierConfig config;
  const PixelClassifier efla(config, 7);
  config.mixer = "deltanet";
  const PixelClassifier deltanet(config, 7), other_seed(config, 8);
  const auto a = parameters_of(efla), b = parameters_of(deltanet), c = parameters_of(other_seed);
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(torch::equal(tensor, b.at(name))) << name;
  EXPECT_FALSE(torch::equal(b.at("positions"), c.at("positions")));
}

// The mixer is causal and the head is affine: what the mean of the tokens says is the mean of what the last tokens of
// all beginnings say.
TEST(PixelClassifier, PoolsTheMeanOrTheLastToken) {
  PixelClassifierConfig config{.hidden = 8, .positions = false, .tokens = 20};
  const auto pixels = torch::rand({2, 20});
  const auto mean = PixelClassifier(config, 1).forward(pixels);
  auto sum = torch::zeros_like(mean);
  config.pooling = "last";
  for (std::int64_t t = 1; t <= 20; ++t) {
    config.tokens = t;
    sum += PixelClassifier(config, 1).forward(pixels.narrow(1, 0, t));
  }
  EXPECT_LE(max_difference(mean, sum / 20), 1e-6);
  EXPECT_GT(max_difference(mean, PixelClassifier(config, 1).forward(pixels)), 1e-4);
}

TEST(PixelClassifier, ConfigurationSurvivesJson) {
  PixelClassifierConfig config{.mixer = "rk4", .layers = 3, .hidden = 96, .heads = 3, .mlp_ratio = 1.5, .conv = 0};
  config.positions = false;
  EXPECT_EQ(to_json(pixel_classifier_config_from_json(to_json(config))), to_json(config));
}

TEST(PixelClassifier, NamesWhatIsWrong) {
  const auto message = [](const PixelClassifierConfig& config) -> std::string {
    try {
      const PixelClassifier model(config, 1);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  EXPECT_NE(message({.mixer = "elfa"}).find("nearest: efla"), std::string::npos);
  EXPECT_NE(message({.layers = 0}).find("layers"), std::string::npos);
  EXPECT_NE(message({.hidden = 64, .heads = 5}).find("heads"), std::string::npos);
  EXPECT_NE(message({.conv = 9}).find("conv"), std::string::npos);
  EXPECT_NE(message({.mlp_ratio = NAN}).find("mlp_ratio: got nan, expected 0 (no MLP) to 64"), std::string::npos);
  EXPECT_NE(message({.pooling = "max"}).find("pooling"), std::string::npos);
  EXPECT_NE(message({.hidden = 1'000'000'000}).find("hidden"), std::string::npos);
  auto json = to_json(PixelClassifierConfig{});
  json["colour"] = 1;
  EXPECT_THROW(pixel_classifier_config_from_json(json), Error);
  json.erase("colour");
  json["layers"] = "two";
  EXPECT_THROW(pixel_classifier_config_from_json(json), Error);
}

}  // namespace
}  // namespace efla::nn
