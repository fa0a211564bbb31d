#include "efla/nn/families/draft_head.h"

#include <algorithm>

namespace efla::nn {

DraftHead::DraftHead(const DraftHeadTensors& from, const FamilyConfig& config, AttentionLayers& attention,
                     const PackedWeight& embeddings, const PackedWeight& output, WeightType weights)
    : width_(config.hidden_size),
      vocab_size_(config.vocab_size),
      layer_(attention.add(from.layer.attention, at_least_int8(weights))),
      norm_eps_(config.norm_eps),
      attention_(attention),
      embeddings_(embeddings),
      output_(output),
      embedding_norm_(from.embedding_norm),
      hidden_norm_(from.hidden_norm),
      before_attention_(from.layer.before_mixer),
      before_mlp_(from.layer.before_mlp),
      norm_(from.norm),
      fc_(packed(std::span(&from.fc, 1), at_least_int8(weights))),
      mlp_(from.layer, config.experts, weights) {}

// Computes the rows x up to the attention's output, from ids and the rows h before them.
void DraftHead::attend(std::span<const std::int32_t> ids, std::span<const TextRun> runs, const View<float, 2>& hidden,
                       const View<float, 2>& x, ThreadPool& pool) {
  const std::int64_t rows = std::ssize(ids);
  const View<float, 2> part = normed_.rows(rows, width_), joined = joined_.rows(rows, 2 * width_);
  const auto join = [&](const View<float, 2>& from, const Vector& weight, std::int64_t column) {
    norm_rows(from, weight, norm_eps_, part, pool);
    for (std::int64_t row = 0; row < rows; ++row) std::copy_n(part.at(row), width_, joined.at(row, column));
  };
  for (std::int64_t row = 0; row < rows; ++row) embeddings_.copy_row(ids[static_cast<std::size_t>(row)], x.at(row));
  join(x, embedding_norm_, 0);
  join(hidden, hidden_norm_, width_);
  fc_.apply(joined, x, pool);
  norm_rows(x, before_attention_, norm_eps_, part, pool);
  attention_.attend(layer_, part, part, runs, pool, /*first_key=*/1);
  add_rows(x, part);
}

void DraftHead::read(std::span<const std::int32_t> ids, std::span<const TextRun> runs, const View<float, 2>& output,
                     std::vector<Draft>* drafts, ThreadPool& pool) {
  const View<float, 2> before = before_.rows(std::ssize(ids), width_);
  std::int64_t row = 0;
  std::size_t draft = 0;
  for (const auto& run : runs) {
    const auto last = hidden(run.slot);
    std::ranges::copy(last, before.at(row));
    std::copy_n(output.at(row), (run.tokens - 1) * width_, before.at(row) + width_);
    if (run.decode && run.tokens > 1) {
      (*drafts)[draft++].hidden.assign(output.at(row), output.at(row) + run.tokens * width_);
    } else {
      std::copy_n(output.at(row + run.tokens - 1), width_, last.begin());
    }
    row += run.tokens;
  }
  attend(ids, runs, before, x_.rows(std::ssize(ids), width_), pool);
}

void DraftHead::accept(const Draft& draft, std::int64_t tokens) {
  std::copy_n(draft.hidden.begin() + (tokens - 1) * width_, width_, hidden(draft.run.slot).begin());
}

std::vector<std::int32_t> DraftHead::draft(std::int64_t slot, std::int64_t tokens, std::int32_t id, std::int64_t most,
                                           ThreadPool& pool) {
  const View<float, 2> before = before_.rows(1, width_), x = x_.rows(1, width_), part = normed_.rows(1, width_);
  const View<float, 2> logits = logits_.rows(1, vocab_size_);
  std::ranges::copy(hidden(slot), before.data);
  std::vector<std::int32_t> drafted;
  while (std::ssize(drafted) < most) {
    const TextRun run{slot, tokens + std::ssize(drafted), 1, true};
    attention_.begin(std::span(&run, 1));
    attend(std::span(&id, 1), std::span(&run, 1), before, x, pool);
    norm_rows(x, before_mlp_, norm_eps_, part, pool);
    mlp_.apply(part, rows_, pool);
    add_rows(x, part);
    norm_rows(x, norm_, norm_eps_, before, pool);
    output_.apply(before, logits, pool);
    id = static_cast<std::int32_t>(std::max_element(logits.data, logits.data + vocab_size_) - logits.data);
    drafted.push_back(id);
  }
  return drafted;
}

}  // namespace efla::nn
