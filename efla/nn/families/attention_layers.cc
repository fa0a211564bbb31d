#include "efla/nn/families/attention_layers.h"

#include <algorithm>
#include <utility>

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

void TextPages::own(std::int64_t slot, std::int64_t begin, std::int64_t end) {
  Text& pages = text(slot);
  const auto count = static_cast<std::size_t>(shape_.pages_for(end));
  for (auto page = static_cast<std::size_t>(begin / shape_.page_tokens); page < count; ++page) {
    if (page < pages.size() && pages[page].use_count() == 1) continue;
    std::shared_ptr<float[]> own(new float[static_cast<std::size_t>(page_floats())]);
    if (page < pages.size()) {
      std::copy_n(pages[page].get(), page_floats(), own.get());
      pages[page] = std::move(own);
    } else {
      pages.push_back(std::move(own));
    }
  }
}

std::vector<float*> TextPages::keys(std::int64_t slot, std::int64_t layer) const {
  std::vector<float*> pages;
  for (const auto& page : text(slot)) pages.push_back(page.get() + layer * layer_floats());
  return pages;
}

std::vector<float*> TextPages::values(std::int64_t slot, std::int64_t layer) const {
  auto pages = keys(slot, layer);
  for (auto& page : pages) page += shape_.key_page_elements();
  return pages;
}

// Calls f(number) for every number of a text's first tokens, in the order of read.
template <class F>
void TextPages::for_each(std::int64_t slot, std::int64_t tokens, F&& f) const {
  const std::int64_t dim = shape_.key_dim, size = shape_.page_tokens;
  const auto each = [&](const std::vector<float*>& pages, std::int64_t token_stride, std::int64_t element_stride) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* page = pages[static_cast<std::size_t>(t / size)] + t % size * token_stride;
      for (std::int64_t g = 0; g < shape_.key_value_heads; ++g) {
        for (std::int64_t i = 0; i < dim; ++i) f(page[g * dim * size + i * element_stride]);
      }
    }
  };
  for (std::int64_t layer = 0; layer < layers_; ++layer) {
    each(keys(slot, layer), 1, size);
    each(values(slot, layer), dim, 1);
  }
}

void TextPages::read(std::int64_t slot, std::int64_t tokens, std::span<float> state) const {
  auto to = state.begin();
  for_each(slot, tokens, [&](float number) { *to++ = number; });
}

void TextPages::write(std::int64_t slot, std::int64_t tokens, std::span<const float> state) {
  clear(slot);
  own(slot, 0, tokens);
  auto from = state.begin();
  for_each(slot, tokens, [&](float& number) { number = *from++; });
}

AttentionLayers::AttentionLayers(const FamilyConfig& config)
    : family_(*config.family),
      shape_(shape_of(config)),
      rotary_(config.rotary),
      rope_theta_(config.rope_theta),
      norm_eps_(config.norm_eps),
      pages_(shape_, config.attention_layers()) {}

std::size_t AttentionLayers::weight_bytes() const {
  std::size_t total = 0;
  for (const auto& layer : layers_) total += layer.in.bytes() + layer.o_proj.bytes();
  return total;
}

void AttentionLayers::begin(std::span<const TextRun> runs) {
  positions_.clear();
  for (const auto& run : runs) {
    if (!layers_.empty()) pages_.own(run.slot, run.begin, run.begin + run.tokens);
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

void AttentionLayers::attend(std::int64_t index, const View<float, 2>& x, const View<float, 2>& y,
                             std::span<const TextRun> runs, ThreadPool& pool) {
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

  std::vector<std::vector<float*>> pages;  // of keys and values of each run
  std::vector<AttentionRun<float>> attention_runs;
  for (const auto& run : runs) {
    pages.push_back(pages_.keys(run.slot, index));
    pages.push_back(pages_.values(run.slot, index));
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    attention_runs.push_back({runs[i].begin, runs[i].tokens, pages[2 * i], pages[2 * i + 1]});
  }
  AttentionForward<float> p;
  p.shape = shape_;
  p.runs = attention_runs;
  p.q = heads_of(q, shape_.heads);
  p.k = heads_of(k, shape_.key_value_heads);
  p.v = heads_of(columns_of(projected, {layer.in.outputs() - keys, keys}), shape_.key_value_heads);
  p.o = heads_of(o, shape_.heads);
  attention_forward(p, {.context = {.pool = &pool}});
  if (family_.gated_attention) {
    glu_forward<float>({gate_.rows(rows, width), o, o, GateActivation::sigmoid}, {.context = {.pool = &pool}});
  }
  layer.o_proj.apply(o, y, pool);
}

}  // namespace efla::nn
