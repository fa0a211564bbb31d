#include "efla/nn/families/attention_layers.h"

#include <algorithm>
#include <utility>

#include "efla/base/error.h"
#include "efla/nn/families/experts.h"
#include "efla/ops/layers/attention.h"
#include "efla/ops/layers/glu.h"
#include "efla/ops/layers/rope.h"

namespace efla::nn {
namespace {

AttentionShape shape_of(const FamilyConfig& config) {
  return {.heads = config.heads,
          .key_value_heads = config.key_value_heads,
          .key_dim = config.head_dim,
          .value_dim = config.head_dim};
}

// Returns the rows of a matrix as heads [R, heads, dim].
View<float, 3> heads_of(const View<float, 2>& rows, std::int64_t heads) {
  const std::int64_t dim = rows.extent[1] / heads;
  return {rows.data, {rows.extent[0], heads, dim}, {rows.stride[0], dim, 1}};
}

}  // namespace

KeyValueType parse_kv_cache_type(const std::string& name) {
  for (const auto type : {KeyValueType::float32, KeyValueType::bfloat16}) {
    if (name == name_of(type)) return type;
  }
  throw Error("model", "kv_cache_type", "'" + name + "'", "float32 or bfloat16");
}

std::string_view name_of(KeyValueType type) { return type == KeyValueType::float32 ? "float32" : "bfloat16"; }

void TextPages::grow(std::int64_t slot, std::int64_t tokens) {
  Text& pages = text(slot);
  while (std::cmp_less(pages.size(), pages_for(tokens))) pages.push_back(std::make_shared<PageBytes>(page_bytes()));
}

// Returns a copy of the last page of a text of this many tokens, with zeros behind the last token, because the tokens
// of drafts that were not accepted leave numbers there.
std::shared_ptr<PageBytes> TextPages::copy_of(const PageBytes& page, std::int64_t tokens) const {
  auto copy = std::make_shared<PageBytes>(page_bytes());
  const std::size_t size = number_bytes(), open = static_cast<std::size_t>(tokens % shape_.page_tokens) * size;
  const auto row = static_cast<std::size_t>(shape_.page_tokens) * size;  // of a channel's keys
  const auto matrix = static_cast<std::size_t>(shape_.value_dim) * row;  // of a head's values
  const auto copy_rows = [&](std::size_t begin, std::size_t bytes, std::size_t stride, std::size_t used) {
    for (std::size_t at = begin; at < begin + bytes; at += stride) std::copy_n(&page[at], used, &(*copy)[at]);
  };
  for (std::size_t begin = 0; begin < page.size(); begin += layer_bytes()) {
    const auto keys = static_cast<std::size_t>(shape_.key_page_elements()) * size;
    copy_rows(begin, keys, row, open);
    copy_rows(begin + keys, layer_bytes() - keys, matrix, open * static_cast<std::size_t>(shape_.value_dim));
  }
  return copy;
}

// Returns the pages of a text of this many tokens, of which the open one is a copy.
TextPages::Text TextPages::shared(std::int64_t slot, std::int64_t tokens) const {
  Text pages(text(slot).begin(), text(slot).begin() + pages_for(tokens));
  if (is_open(tokens)) pages.back() = copy_of(*pages.back(), tokens);
  return pages;
}

void TextPages::copy(std::int64_t from, std::int64_t to, std::int64_t tokens) { text(to) = shared(from, tokens); }

std::vector<Page> TextPages::pages(std::int64_t slot, std::int64_t tokens) const {
  const Text pages = shared(slot, tokens);
  return {pages.begin(), pages.end()};
}

void TextPages::set(std::int64_t slot, std::int64_t tokens, std::span<const Page> pages) {
  Text own;
  // Attention takes all pages in one list, but writes only behind the full ones.
  for (const auto& page : pages) own.push_back(std::const_pointer_cast<PageBytes>(page));
  if (is_open(tokens)) own.back() = std::make_shared<PageBytes>(*own.back());
  text(slot) = std::move(own);
}

template <class S>
std::vector<S*> TextPages::keys(std::int64_t slot, std::int64_t layer) const {
  std::vector<S*> pages;
  for (const auto& page : text(slot)) {
    pages.push_back(reinterpret_cast<S*>(page->data() + static_cast<std::size_t>(layer) * layer_bytes()));
  }
  return pages;
}

template <class S>
std::vector<S*> TextPages::values(std::int64_t slot, std::int64_t layer) const {
  auto pages = keys<S>(slot, layer);
  for (auto& page : pages) page += shape_.key_page_elements();
  return pages;
}

AttentionLayers::AttentionLayers(const FamilyConfig& config, std::int64_t layers, KeyValueType type)
    : family_(*config.family),
      shape_(shape_of(config)),
      rotary_(config.rotary),
      rope_theta_(config.rope_theta),
      norm_eps_(config.norm_eps),
      pages_(shape_, layers, type) {}

std::int64_t AttentionLayers::add(const AttentionTensors& tensors, WeightType weights) {
  layers_.push_back(
      {tensors.q_norm, tensors.k_norm, packed(tensors.in, weights), packed(std::span(&tensors.out, 1), weights)});
  return std::ssize(layers_) - 1;
}

std::size_t AttentionLayers::weight_bytes() const {
  std::size_t total = 0;
  for (const auto& layer : layers_) total += layer.in.bytes() + layer.o_proj.bytes();
  return total;
}

void AttentionLayers::begin(std::span<const TextRun> runs) {
  positions_.clear();
  for (const auto& run : runs) {
    pages_.grow(run.slot, run.begin + run.tokens);
    for (std::int64_t t = 0; t < run.tokens; ++t) positions_.push_back(run.begin + t);
  }
}

// Copies queries, gates and keys out of the rows of projections, where each head's gate lies behind its query.
void AttentionLayers::split(const View<float, 2>& projected) {
  const std::int64_t rows = projected.extent[0], dim = shape_.key_dim, keys = shape_.key_value_heads * dim;
  const View<float, 2> q = q_.rows(rows, shape_.heads * dim), gate = gate_.rows(rows, shape_.heads * dim);
  const View<float, 2> k = k_.rows(rows, keys);
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* from = projected.at(row);
    for (std::int64_t h = 0; h < shape_.heads; ++h) {
      std::copy_n(from, dim, q.at(row, h * dim));
      from += dim;
      if (!family_.gated_attention) continue;
      std::copy_n(from, dim, gate.at(row, h * dim));
      from += dim;
    }
    std::copy_n(from, keys, k.at(row));
  }
}

void AttentionLayers::rotate(const View<float, 2>& rows, std::int64_t heads, ThreadPool& pool) {
  if (rotary_ == 0) return;
  const View<float, 3> x = heads_of(rows, heads);
  RopeForward p;
  p.x = x;
  p.positions = View<const std::int64_t, 1>::contiguous(positions_.data(), {std::ssize(positions_)});
  p.rotary = rotary_;
  p.theta = rope_theta_;
  p.y = x;
  rope_forward(p, {.context = {.pool = &pool}});
}

// Computes a problem that has no pages yet.
template <class S>
void AttentionLayers::attend_pages(std::int64_t layer, AttentionForward<S> problem, std::span<const TextRun> runs,
                                   ThreadPool& pool) {
  std::vector<std::vector<S*>> pages;  // of keys and values of each run
  for (const auto& run : runs) {
    pages.push_back(pages_.keys<S>(run.slot, layer));
    pages.push_back(pages_.values<S>(run.slot, layer));
  }
  std::vector<AttentionRun<S>> attention_runs;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    attention_runs.push_back({runs[i].begin, runs[i].tokens, pages[2 * i], pages[2 * i + 1]});
  }
  problem.shape = shape_;
  problem.runs = attention_runs;
  attention_forward(problem, {.context = {.pool = &pool}});
}

void AttentionLayers::attend(std::int64_t index, const View<float, 2>& x, const View<float, 2>& y,
                             std::span<const TextRun> runs, ThreadPool& pool, std::int64_t first_key) {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  const std::int64_t rows = x.extent[0], width = shape_.heads * shape_.key_dim;
  const std::int64_t keys = shape_.key_value_heads * shape_.key_dim;
  const View<float, 2> projected = projected_.rows(rows, layer.in.outputs());
  layer.in.apply(x, projected, pool);
  split(projected);
  const View<float, 2> q = q_.rows(rows, width), k = k_.rows(rows, keys), o = o_.rows(rows, width);
  const auto norm = [&](const View<float, 2>& all, const Vector& weight) {
    const View<float, 2> heads =
        View<float, 2>::contiguous(all.data, {all.size() / std::ssize(weight), std::ssize(weight)});
    norm_rows(heads, weight, norm_eps_, heads, pool);
  };
  norm(q, layer.q_norm);
  norm(k, layer.k_norm);
  rotate(q, shape_.heads, pool);
  rotate(k, shape_.key_value_heads, pool);

  const auto compute = [&]<class S>(AttentionForward<S> p) {
    p.first_key = first_key;
    p.q = heads_of(q, shape_.heads);
    p.k = heads_of(k, shape_.key_value_heads);
    p.v = heads_of(columns_of(projected, {layer.in.outputs() - keys, keys}), shape_.key_value_heads);
    p.o = heads_of(o, shape_.heads);
    attend_pages(index, p, runs, pool);
  };
  pages_.type() == KeyValueType::float32 ? compute(AttentionForward<float>()) : compute(AttentionForward<bfloat16>());
  if (family_.gated_attention) {
    glu_forward<float>({gate_.rows(rows, width), o, o, GateActivation::sigmoid}, {.context = {.pool = &pool}});
  }
  layer.o_proj.apply(o, y, pool);
}

}  // namespace efla::nn
