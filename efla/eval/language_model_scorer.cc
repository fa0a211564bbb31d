#include "efla/eval/language_model_scorer.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>

namespace efla::eval {
namespace {

constexpr std::int64_t kSliceLogits = 1 << 23;  // 32 MiB in float32

// Appends a score for each of x [N, D] and its token.
void append_scores(const torch::Tensor& x, const torch::Tensor& head, const torch::Tensor& tokens,
                   std::vector<TargetScore>& scores) {
  const auto logits = torch::matmul(x, head.t()).to(torch::kFloat32);  // [N, vocab]
  const auto log_probabilities =
      torch::log_softmax(logits, 1).gather(1, tokens.unsqueeze(1)).squeeze(1).to(torch::kCPU, torch::kFloat64);
  const auto greedy = logits.argmax(1).eq(tokens).to(torch::kCPU);
  const auto log_probability = log_probabilities.accessor<double, 1>();
  const auto is_greedy = greedy.accessor<bool, 1>();
  for (std::int64_t i = 0; i < log_probabilities.size(0); ++i) scores.push_back({log_probability[i], is_greedy[i]});
}

}  // namespace

Scorer make_scorer(const nn::LanguageModel& model) {
  return [&model](const ScoreBatch& batch) {
    const torch::NoGradGuard no_grad;
    const auto& head = model.head();
    std::vector<std::int64_t> rows, tokens;  // of the flattened batch
    for (const auto& target : batch.targets) {
      rows.push_back(target.row * batch.length + target.position);
      tokens.push_back(target.token);
    }
    const auto on_device = [&](const std::vector<std::int64_t>& values) {
      return torch::tensor(at::ArrayRef<std::int64_t>(values), torch::kInt64).to(head.device());
    };
    const auto hidden = model.hidden(on_device(batch.tokens).view({batch.rows, batch.length})).flatten(0, 1);
    const auto all_rows = on_device(rows), all_tokens = on_device(tokens);
    const auto count = static_cast<std::int64_t>(rows.size());
    const std::int64_t slice = std::max<std::int64_t>(1, kSliceLogits / head.size(0));
    std::vector<TargetScore> scores;
    for (std::int64_t begin = 0; begin < count; begin += slice) {
      const auto size = std::min(slice, count - begin);
      append_scores(hidden.index_select(0, all_rows.narrow(0, begin, size)), head, all_tokens.narrow(0, begin, size),
                    scores);
    }
    return scores;
  };
}

}  // namespace efla::eval
