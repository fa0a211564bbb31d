#include "efla/eval/language_model_scorer.h"

#include <gtest/gtest.h>
#include <torch/autograd.h>

namespace efla::eval {
namespace {

// A language model's scores are those of its logits, row by row.
TEST(LanguageModelScorer, ReadsTheLogits) {
  nn::LanguageModelConfig config;
  config.vocab_size = 31;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  const nn::LanguageModel model(config, nn::Initialiser(7));
  const auto scorer = make_scorer(model);
  const ScoreBatch batch{2, 5, {3, 1, 4, 1, 5, 9, 2, 6, 0, 0}, {{0, 0, 1}, {0, 4, 30}, {1, 2, 7}, {1, 2, 8}}};
  const auto scores = scorer(batch);
  ASSERT_EQ(scores.size(), 4U);
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const auto& target = batch.targets[i];
    std::vector<std::int64_t> row(batch.tokens.begin() + target.row * 5,
                                  batch.tokens.begin() + target.row * 5 + target.position + 1);
    const auto logits = model.logits(torch::tensor(row).unsqueeze(0))[0][target.position].to(torch::kFloat64);
    EXPECT_NEAR(scores[i].log_probability, torch::log_softmax(logits, 0)[target.token].item<double>(), 1e-5);
    EXPECT_EQ(scores[i].greedy, logits.argmax().item<std::int64_t>() == target.token);
    const auto best =
        scorer({1, target.position + 1, row, {{0, target.position, logits.argmax().item<std::int64_t>()}}});
    EXPECT_TRUE(best[0].greedy);
  }
}

}  // namespace
}  // namespace efla::eval
