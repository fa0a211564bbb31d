// The contract of an attention layer's part of a decode step between the projections of its input and the projection of
// its output, for one token per text: norms of queries and keys, rotary positions, softmax attention over pages, and
// the output gate. docs/ops/attention_step.md describes the operator.
#pragma once

#include <cmath>
#include <cstdint>

#include "efla/base/device.h"
#include "efla/base/view.h"
#include "efla/rule/attention.h"

namespace efla {

// The pages of texts in slots. Each page has, for one layer, the keys [G, K, P] and the values [G, P, V] of
// rule/attention.h at offsets that are the same in all pages. S, the type in which they are stored, is float or
// bfloat16.
template <class S>
struct PageTable {
  View<S* const, 2> pages;                        // [slots, M]: page n of a text has its tokens n·P to n·P + P − 1
  std::int64_t key_offset = 0, value_offset = 0;  // elements from the beginning of a page to its keys and its values
};

// With N(x) the RMS norm (rule/rms_norm.h) and R the rotation by the token's position (rule/rope.h):
//
//   o = attention(R(N(q)), R(N(k)), v) · σ(gate)
//
// of rule/attention.h. The call writes the token's own key and value behind those of the earlier tokens, into the page,
// and attends to them too. The norm is of each head, or of all heads together. V is K.
template <class S>
struct AttentionStep {
  AttentionShape shape;
  double scale = NAN;        // NaN: K^(−1/2)
  View<const float, 2> qkv;  // [B, H·K + 2·G·K]: queries, keys and values; with `gated` [B, 2·H·K + 2·G·K], where
                             // each head's gate lies behind its query
  bool gated = false;           // false: no gate
  View<const float, 1> q_norm;  // weight [K] of the norm of each head, or [H·K] of the norm of all heads
  View<const float, 1> k_norm;  // the same, [K] or [G·K]
  float norm_eps = 1e-6F;
  std::int64_t rotary = 0;  // R, as in RopeForward
  double theta = 10000.0;
  View<const std::int64_t, 1> slots;      // [B], no two alike; −1: an entry without a text, whose outputs are zeros
  View<const std::int64_t, 1> positions;  // [B]: tokens of the text before this one
  PageTable<S> table;
  View<std::int32_t, 1> arrivals = {};  // [B·G], zeros before and after the call; for a GPU
  View<float, 2> o;                     // [B, H·K]

  // Returns K.
  constexpr std::int64_t dim() const { return shape.key_dim; }
  // Returns the first column of the query of head h, of the gate of head h, and of the key and the value of head g.
  constexpr std::int64_t query_column(std::int64_t h) const { return h * dim() * (gated ? 2 : 1); }
  constexpr std::int64_t gate_column(std::int64_t h) const { return query_column(h) + dim(); }
  constexpr std::int64_t key_column(std::int64_t g) const { return query_column(shape.heads) + g * dim(); }
  constexpr std::int64_t value_column(std::int64_t g) const { return key_column(shape.key_value_heads + g); }
  double scale_or_default() const {
    return std::isnan(scale) ? 1.0 / std::sqrt(static_cast<double>(shape.key_dim)) : scale;
  }
};

// Copies keys and values of tokens to their pages, or from their pages.
template <class S>
struct PageCopy {
  AttentionShape shape;
  bool to_pages = true;
  View<const std::int64_t, 1> slots, positions;  // [N]: the slot of each token's text, and its number in the text
  PageTable<S> table;
  View<S, 3> keys, values;  // [N, G, K], [N, G, V]
};

// Throw Error as validate of rule/validate.h does.
template <class S>
void validate(const AttentionStep<S>& problem, const Device& device = {});
template <class S>
void validate(const PageCopy<S>& problem, const Device& device = {});

}  // namespace efla
