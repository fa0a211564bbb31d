#include "efla/ref/attention_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "efla/ref/attention.h"
#include "efla/ref/elementwise.h"
#include "efla/rule/rope.h"

namespace efla::ref {
namespace {

using Row = std::vector<float>;

// Returns `heads` heads of a row from column first_of(head) on, normalised and rotated.
template <class S, class First>
Row prepared(const AttentionStep<S>& p, std::int64_t row, std::int64_t heads, First&& first_of,
             const View<const float, 1>& weight) {
  const std::int64_t dim = p.dim(), half = p.rotary / 2;
  std::vector<double> x;
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < dim; ++i) x.push_back(p.qkv(row, first_of(h) + i));
  }
  const std::int64_t together = weight.extent[0];
  for (std::int64_t first = 0; first < heads * dim; first += together) {
    double squares = 0;
    for (std::int64_t i = 0; i < together; ++i) squares += x[first + i] * x[first + i];
    const double r = 1 / std::sqrt(squares / static_cast<double>(together) + p.norm_eps);
    for (std::int64_t i = 0; i < together; ++i) x[first + i] *= r * weight(i);
  }
  RopeForward rope;
  rope.rotary = p.rotary;
  rope.theta = p.theta;
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p.positions(row)) * rope.frequency(i);
      double &a = x[h * dim + i], &b = x[h * dim + half + i];
      const double turned = a * std::cos(angle) - b * std::sin(angle);
      b = b * std::cos(angle) + a * std::sin(angle);
      a = turned;
    }
  }
  return {x.begin(), x.end()};
}

// Returns the addresses of what is `offset` elements behind the beginning of the text's pages.
template <class S>
std::vector<S*> pages_of(const PageTable<S>& table, std::int64_t slot, std::int64_t count, std::int64_t offset) {
  std::vector<S*> pages;
  for (std::int64_t n = 0; n < count; ++n) pages.push_back(table.pages(slot, n) + offset);
  return pages;
}

// Computes a row's text.
template <class S>
void attend(const AttentionStep<S>& p, std::int64_t row) {
  const std::int64_t dim = p.dim(), heads = p.shape.heads, groups = p.shape.key_value_heads;
  const Row q = prepared(
      p, row, heads, [&](std::int64_t h) { return p.query_column(h); }, p.q_norm);
  const Row k = prepared(
      p, row, groups, [&](std::int64_t g) { return p.key_column(g); }, p.k_norm);
  const std::int64_t begin = p.positions(row), count = p.shape.pages_for(begin + 1);
  const auto keys = pages_of(p.table, p.slots(row), count, p.table.key_offset);
  const auto values = pages_of(p.table, p.slots(row), count, p.table.value_offset);
  const std::array<AttentionRun<S>, 1> runs{{{begin, 1, keys, values}}};
  AttentionForward<S> attention;
  attention.shape = p.shape;
  attention.scale = p.scale;
  attention.runs = runs;
  attention.q = View<const float, 3>::contiguous(q.data(), {1, heads, dim});
  attention.k = View<const float, 3>::contiguous(k.data(), {1, groups, dim});
  attention.v = View<const float, 3>{p.qkv.at(row, p.value_column(0)), {1, groups, dim}, {0, dim, 1}};
  attention.o = View<float, 3>{p.o.at(row), {1, heads, dim}, {0, dim, 1}};
  ref::attention(attention);
  for (std::int64_t h = 0; p.gated && h < heads; ++h) {
    for (std::int64_t i = 0; i < dim; ++i) {
      float& o = p.o(row, h * dim + i);
      o = static_cast<float>(o * sigmoid(static_cast<double>(p.qkv(row, p.gate_column(h) + i))));
    }
  }
}

}  // namespace

template <class S>
void attention_step(const AttentionStep<S>& p) {
  for (std::int64_t row = 0; row < p.qkv.extent[0]; ++row) {
    if (p.slots(row) >= 0) {
      attend(p, row);
    } else {
      for (std::int64_t c = 0; c < p.o.extent[1]; ++c) p.o(row, c) = 0;
    }
  }
}

template <class S>
void copy_pages(const PageCopy<S>& p) {
  const AttentionShape& shape = p.shape;
  const auto copy = [&](S& in_page, S& token) { p.to_pages ? in_page = token : token = in_page; };
  for (std::int64_t n = 0; n < p.slots.extent[0]; ++n) {
    S* const page = p.table.pages(p.slots(n), p.positions(n) / shape.page_tokens);
    const std::int64_t at = p.positions(n) % shape.page_tokens;
    for (std::int64_t g = 0; g < shape.key_value_heads; ++g) {
      S* const keys = page + p.table.key_offset + g * shape.key_dim * shape.page_tokens + at;
      S* const values = page + p.table.value_offset + (g * shape.page_tokens + at) * shape.value_dim;
      for (std::int64_t i = 0; i < shape.key_dim; ++i) copy(keys[i * shape.page_tokens], p.keys(n, g, i));
      for (std::int64_t j = 0; j < shape.value_dim; ++j) copy(values[j], p.values(n, g, j));
    }
  }
}

template void attention_step(const AttentionStep<float>&);
template void attention_step(const AttentionStep<bfloat16>&);
template void copy_pages(const PageCopy<float>&);
template void copy_pages(const PageCopy<bfloat16>&);

}  // namespace efla::ref
