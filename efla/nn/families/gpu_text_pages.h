// The keys and values of texts in the memory of a GPU, in pages that texts share.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "efla/nn/families/attention_layers.h"
#include "efla/nn/inference/text_run.h"
#include "efla/rule/attention_step.h"

namespace efla::nn {

// The keys and values of texts in slots, in a GPU's memory, with the functions of TextPages. A text that leaves its
// slot has the pages of TextPages in the process's memory, so that a CPU and a GPU can both continue it.
class GpuTextPages {
 public:
  // type: of the numbers in slots, float32 or bfloat16; outside: of the pages outside of slots.
  GpuTextPages(const AttentionShape& shape, std::int64_t layers, torch::ScalarType type, KeyValueType outside,
               torch::Device device);

  std::size_t page_bytes() const { return static_cast<std::size_t>(page_numbers()) * torch::elementSize(type_); }
  KeyValueType outside() const { return outside_; }
  std::size_t outside_bytes() const {
    return static_cast<std::size_t>(page_numbers()) * torch::elementSize(outside_type());
  }

  void make_slots(std::int64_t slots);
  // Frees the pages of a text.
  void clear(std::int64_t slot);
  // Gives a text pages for this many tokens.
  void grow(std::int64_t slot, std::int64_t tokens);
  // Lets a text share the full pages of another one, of this many tokens, and copies the page behind them.
  void copy(std::int64_t from, std::int64_t to, std::int64_t tokens);
  // Returns the pages of a text of this many tokens outside of slots.
  std::vector<Page> pages(std::int64_t slot, std::int64_t tokens);
  // Sets a text of this many tokens from its pages outside of slots.
  void set(std::int64_t slot, std::int64_t tokens, std::span<const Page> pages);

  // Returns the addresses of the texts' pages [slots, M] int64 on the device. The tensor is the same until a text has
  // more than M pages.
  const torch::Tensor& addresses();
  // Returns the table of a layer. S is the type. addresses() must have been called since pages have changed.
  template <class S>
  PageTable<S> table(std::int64_t layer) const {
    const std::int64_t first = layer * (shape_.key_page_elements() + shape_.value_page_elements());
    return {View<S* const, 2>::contiguous(static_cast<S* const*>(addresses_.data_ptr()),
                                          {addresses_.size(0), addresses_.size(1)}),
            first, first + shape_.key_page_elements()};
  }
  const AttentionShape& shape() const { return shape_; }
  torch::ScalarType type() const { return type_; }

 private:
  struct GpuPage {
    torch::Tensor numbers;
    std::weak_ptr<const PageBytes> outside = {};  // the same page outside of slots, while it is in memory
    std::uint64_t id = 0;                         // of this page, also when it is not; 0: there was none
  };
  using Text = std::vector<std::shared_ptr<GpuPage>>;

  std::int64_t page_numbers() const { return layers_ * (shape_.key_page_elements() + shape_.value_page_elements()); }
  Text& text(std::int64_t slot) { return texts_[static_cast<std::size_t>(slot)]; }
  const Text& text(std::int64_t slot) const { return texts_[static_cast<std::size_t>(slot)]; }
  torch::ScalarType outside_type() const {
    return outside_ == KeyValueType::float32 ? torch::kFloat : torch::kBFloat16;
  }
  std::int64_t pages_for(std::int64_t tokens) const { return layers_ == 0 ? 0 : shape_.pages_for(tokens); }
  std::int64_t full_pages(std::int64_t tokens) const { return layers_ == 0 ? 0 : tokens / shape_.page_tokens; }
  std::shared_ptr<GpuPage> new_page() const;
  std::shared_ptr<GpuPage> inside(const Page& page);
  void note(const Page& outside, const std::shared_ptr<GpuPage>& page);
  torch::Tensor cut(const torch::Tensor& page, std::int64_t tokens) const;
  void change(std::int64_t slot) { changed_[static_cast<std::size_t>(slot)] = true; }

  AttentionShape shape_;
  std::int64_t layers_;
  torch::ScalarType type_;
  KeyValueType outside_;
  torch::Device device_;
  std::vector<Text> texts_;
  std::unordered_map<std::uint64_t, std::weak_ptr<GpuPage>> inside_;  // by the ids of pages outside of slots
  std::size_t most_inside_ = 64;  // entries of inside_ with which the ones of pages that are gone are erased
  torch::Tensor addresses_;       // [slots, M]
  std::vector<bool> changed_;     // texts whose pages have changed since addresses_ was written
};

}  // namespace efla::nn
