#include "efla/ref/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "efla/base/dtype.h"

namespace efla::ref {
namespace {

// Returns the weights of tokens 0 to t of a run's text for query head h of row `row` of q, not yet divided by their
// sum, and adds them to `sum`. Tokens that are not used have weight 0.
template <class S>
std::vector<double> weights_of(const AttentionForward<S>& p, const AttentionRun<S>& run, std::int64_t t,
                               std::int64_t row, std::int64_t h, double& sum) {
  const AttentionShape& shape = p.shape;
  std::vector<double> weights;
  double largest = -INFINITY;
  for (std::int64_t s = 0; s <= t; ++s) {
    const S* keys = key_matrix(shape, run, s / shape.page_tokens, h / shape.group()) + s % shape.page_tokens;
    double score = 0;
    for (std::int64_t i = 0; i < shape.key_dim; ++i) {
      score += static_cast<double>(p.q(row, h, i)) * to_float(keys[i * shape.page_tokens]);
    }
    weights.push_back(s < std::min(p.first_key, t) ? -INFINITY : p.scale_or_default() * score);
    largest = std::max(largest, weights.back());
  }
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  return weights;
}

// Computes o of query head h of row `row`, which is token t of the run's text.
template <class S>
void attend(const AttentionForward<S>& p, const AttentionRun<S>& run, std::int64_t t, std::int64_t row,
            std::int64_t h) {
  const AttentionShape& shape = p.shape;
  double sum = 0;
  const std::vector<double> weights = weights_of(p, run, t, row, h, sum);
  std::vector<double> o(static_cast<std::size_t>(shape.value_dim));
  for (std::int64_t s = 0; s <= t; ++s) {
    const S* values =
        value_matrix(shape, run, s / shape.page_tokens, h / shape.group()) + s % shape.page_tokens * shape.value_dim;
    for (std::size_t j = 0; j < o.size(); ++j) o[j] += weights[static_cast<std::size_t>(s)] * to_float(values[j]);
  }
  for (std::int64_t j = 0; j < shape.value_dim; ++j) {
    p.o(row, h, j) = static_cast<float>(o[static_cast<std::size_t>(j)] / sum);
  }
}

}  // namespace

template <class S>
void attention(const AttentionForward<S>& p) {
  std::int64_t first = 0;
  for (const auto& run : p.runs) {
    for (std::int64_t t = 0; t < run.tokens; ++t) write_key_value(p, run, t, first + t);
    for (std::int64_t t = 0; t < run.tokens; ++t) {
      for (std::int64_t h = 0; h < p.shape.heads; ++h) attend(p, run, run.begin + t, first + t, h);
    }
    first += run.tokens;
  }
}

template void attention(const AttentionForward<float>&);
template void attention(const AttentionForward<bfloat16>&);

}  // namespace efla::ref
