// The contract of causal softmax attention (Vaswani et al., "Attention is all you need", 2017, arXiv 1706.03762) of new
// tokens to all tokens of their texts, whose keys and values lie in pages. docs/ops/attention.md describes the
// operator.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "efla/base/dtype.h"
#include "efla/base/view.h"

namespace efla {

// Keys per block of the kernels. A page has a multiple of this many tokens, so that no block crosses a page's end.
inline constexpr std::int64_t kAttentionBlock = 64;

struct AttentionShape {
  std::int64_t heads = 0, key_value_heads = 0;  // H query heads, and G, a divisor of H
  std::int64_t key_dim = 0, value_dim = 0;      // K, V
  std::int64_t page_tokens = kAttentionBlock;  // P: token t of a text lies in page t / P, a multiple of kAttentionBlock

  constexpr std::int64_t group() const { return heads / key_value_heads; }  // query heads per key and value head
  constexpr std::int64_t key_page_elements() const { return key_value_heads * key_dim * page_tokens; }
  constexpr std::int64_t value_page_elements() const { return key_value_heads * page_tokens * value_dim; }
  constexpr std::int64_t pages_for(std::int64_t tokens) const { return (tokens + page_tokens - 1) / page_tokens; }
};

// Consecutive new tokens of one text, and the pages of the text. A call has at most one run per text. It writes the
// keys and values of the new tokens, so the pages of these tokens belong to this text alone. All earlier pages may be
// shared with other texts. S, the type in which keys and values are stored, is float or bfloat16.
template <class S>
struct AttentionRun {
  std::int64_t begin = 0;   // tokens of the text before the run
  std::int64_t tokens = 1;  // of the run, at least 1
  // Pages 0, 1, … of the text, at least ⌈(begin + tokens) / P⌉. A page of keys is [G, K, P], so that the elements of
  // one channel of neighbouring tokens lie side by side; a page of values is [G, P, V]. Both are contiguous. The
  // elements of tokens after the run are never used.
  std::span<S*const> key_pages, value_pages;
};

// Per run, new token t and query head h, with head g = h / (H/G) of keys and values:
//
//   o_t = Σ_{s ≤ t} w_ts v_s,    w_ts = exp(scale q_t·k_s) / Σ_{r ≤ t} exp(scale q_t·k_r)
//
// s and r are the tokens of the text from min(first_key, t) to t itself, earlier ones and new ones. All keys and
// values, also those of the new tokens, are used as they are stored: rounded to S. The rows of q, k, v and o are the N
// new tokens of all runs, one run after the other.
template <class S>
struct AttentionForward {
  AttentionShape shape;
  double scale = NAN;          // NaN: K^(−1/2)
  std::int64_t first_key = 0;  // tokens of a text that no later token uses, less than kAttentionBlock
  std::span<const AttentionRun<S>> runs;
  View<const float, 3> q;  // [N, H, K]
  View<const float, 3> k;  // [N, G, K]
  View<const float, 3> v;  // [N, G, V]
  View<float, 3> o;        // [N, H, V]

  double scale_or_default() const {
    return std::isnan(scale) ? 1.0 / std::sqrt(static_cast<double>(shape.key_dim)) : scale;
  }
  // Returns N.
  std::int64_t rows() const {
    std::int64_t rows = 0;
    for (const auto& run : runs) rows += run.tokens;
    return rows;
  }
};

// Return the first element of head g of a page, a matrix [K, P] of keys or [P, V] of values.
template <class S>
S* key_matrix(const AttentionShape& shape, const AttentionRun<S>& run, std::int64_t page, std::int64_t g) {
  return run.key_pages[static_cast<std::size_t>(page)] + g * shape.key_dim * shape.page_tokens;
}
template <class S>
S* value_matrix(const AttentionShape& shape, const AttentionRun<S>& run, std::int64_t page, std::int64_t g) {
  return run.value_pages[static_cast<std::size_t>(page)] + g * shape.page_tokens * shape.value_dim;
}

// Rounds the keys and values of new token t of a run, row `row` of k and v, to S and writes them into the text's page.
template <class S>
void write_key_value(const AttentionForward<S>& p, const AttentionRun<S>& run, std::int64_t t, std::int64_t row) {
  const AttentionShape& shape = p.shape;
  const std::int64_t page = (run.begin + t) / shape.page_tokens, at = (run.begin + t) % shape.page_tokens;
  for (std::int64_t g = 0; g < shape.key_value_heads; ++g) {
    S* keys = key_matrix(shape, run, page, g) + at;
    S* values = value_matrix(shape, run, page, g) + at * shape.value_dim;
    for (std::int64_t i = 0; i < shape.key_dim; ++i) keys[i * shape.page_tokens] = from_state<S>(p.k(row, g, i));
    for (std::int64_t j = 0; j < shape.value_dim; ++j) values[j] = from_state<S>(p.v(row, g, j));
  }
}

// Throws Error as validate of rule/validate.h does.
template <class S>
void validate(const AttentionForward<S>& problem);

}  // namespace efla
