#include "cli/eval/engine_scorer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace efla::cli {
namespace {

using eval::ScoreBatch;
using eval::TargetScore;

constexpr std::int64_t kSlots = 8;              // rows that are read together
constexpr std::int64_t kTokens = 2048;          // of rows that are read together, where they are several
constexpr std::int64_t kSliceLogits = 1 << 23;  // 32 MiB in float32

// Returns the score of a token from the logits of its position.
TargetScore score_of(const float* logits, std::int64_t vocab_size, std::int64_t token) {
  const float* largest = std::max_element(logits, logits + vocab_size);
  double sum = 0.0;
  for (std::int64_t i = 0; i < vocab_size; ++i) sum += std::exp(static_cast<double>(logits[i] - *largest));
  return {static_cast<double>(logits[token] - *largest) - std::log(sum), largest - logits == token};
}

// Scores batches, some rows at a time.
class EngineScorer {
 public:
  EngineScorer(std::shared_ptr<engine::EngineModel> model, std::int64_t longest, ThreadPool& pool)
      : model_(std::move(model)), pool_(&pool) {
    const auto memory = model_->text_memory();
    model_->make_slots(kSlots, std::max(memory.pages(longest), memory.pages(kTokens) + kSlots));
  }

  std::vector<TargetScore> operator()(const ScoreBatch& batch) const {
    std::vector<std::int64_t> needed(static_cast<std::size_t>(batch.rows), 0);  // tokens of each row
    for (const auto& target : batch.targets) {
      auto& tokens = needed[static_cast<std::size_t>(target.row)];
      tokens = std::max(tokens, target.position + 1);
    }
    std::vector<TargetScore> scores(batch.targets.size());
    for (std::int64_t row = 0; row < batch.rows;) {
      const auto first = row;
      std::vector<std::int32_t> ids;
      std::vector<nn::TextRun> runs;
      std::vector<std::int64_t> begins;  // of the rows in ids
      for (; row < batch.rows && row - first < kSlots; ++row) {
        const auto tokens = needed[static_cast<std::size_t>(row)];
        if (row > first && std::ssize(ids) + tokens > kTokens) break;
        begins.push_back(std::ssize(ids));
        const auto* from = batch.tokens.data() + row * batch.length;
        ids.insert(ids.end(), from, from + tokens);
        runs.push_back({.slot = row - first, .tokens = tokens});
        model_->clear(row - first);
      }
      model_->advance(ids, runs, *pool_);
      score_rows(batch, first, begins, scores);
      for (const auto& run : runs) model_->drop(run.slot);
    }
    return scores;
  }

 private:
  // Scores the targets of the rows from `first` on, which were read: one row for each element of `begins`.
  void score_rows(const ScoreBatch& batch, std::int64_t first, const std::vector<std::int64_t>& begins,
                  std::vector<TargetScore>& scores) const {
    const std::int64_t vocab_size = model_->config().vocab_size;
    const auto slice = static_cast<std::size_t>(std::max<std::int64_t>(1, kSliceLogits / vocab_size));
    std::vector<std::size_t> targets;
    for (std::size_t i = 0; i < batch.targets.size(); ++i) {
      const auto row = batch.targets[i].row;
      if (row >= first && row < first + std::ssize(begins)) targets.push_back(i);
    }
    for (std::size_t begin = 0; begin < targets.size(); begin += slice) {
      const auto count = std::min(slice, targets.size() - begin);
      const auto target = [&](std::size_t i) -> const ScoreBatch::Target& { return batch.targets[targets[begin + i]]; };
      std::vector<std::int64_t> rows;
      for (std::size_t i = 0; i < count; ++i) {
        rows.push_back(begins[static_cast<std::size_t>(target(i).row - first)] + target(i).position);
      }
      const auto logits = model_->logits(rows, *pool_);
      pool_->run(static_cast<std::int64_t>(count), [&](std::int64_t i, int) {
        const auto at = static_cast<std::size_t>(i);
        scores[targets[begin + at]] = score_of(logits.at(i), vocab_size, target(at).token);
      });
    }
  }

  std::shared_ptr<engine::EngineModel> model_;
  ThreadPool* pool_;
};

}  // namespace

eval::Scorer make_scorer(std::shared_ptr<engine::EngineModel> model, std::int64_t longest, ThreadPool& pool) {
  return EngineScorer(std::move(model), longest, pool);
}

}  // namespace efla::cli
