#include "efla/nn/families/gpu_text_pages.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace efla::nn {

using torch::Tensor;

namespace {

constexpr std::int64_t kFirstPages = 64;    // of each text in the first table
constexpr std::int64_t kPagesPerCopy = 64;  // to the process's memory

}  // namespace

GpuTextPages::GpuTextPages(const AttentionShape& shape, std::int64_t layers, torch::ScalarType type,
                           KeyValueType outside, torch::Device device)
    : shape_(shape), layers_(layers), type_(type), outside_(outside), device_(device) {}

void GpuTextPages::make_slots(std::int64_t slots) {
  texts_.assign(static_cast<std::size_t>(slots), Text());
  changed_.assign(texts_.size(), false);
  addresses_ = torch::zeros({slots, kFirstPages}, torch::TensorOptions(torch::kLong).device(device_));
}

void GpuTextPages::clear(std::int64_t slot) { text(slot).clear(); }

std::shared_ptr<GpuTextPages::GpuPage> GpuTextPages::new_page() const {
  auto page = std::make_shared<GpuPage>();
  page->numbers = torch::empty({page_numbers()}, torch::TensorOptions(type_).device(device_));
  return page;
}

void GpuTextPages::grow(std::int64_t slot, std::int64_t tokens) {
  Text& pages = text(slot);
  while (std::cmp_less(pages.size(), pages_for(tokens))) {
    pages.push_back(new_page());
    change(slot);
  }
}

void GpuTextPages::copy(std::int64_t from, std::int64_t to, std::int64_t tokens) {
  Text pages(text(from).begin(), text(from).begin() + pages_for(tokens));
  if (full_pages(tokens) < std::ssize(pages)) {
    auto own = std::make_shared<GpuPage>();
    own->numbers = pages.back()->numbers.clone();
    pages.back() = std::move(own);
  }
  text(to) = std::move(pages);
  change(to);
}

// Returns a copy of the last page of a text of this many tokens, with zeros behind the last token.
Tensor GpuTextPages::cut(const Tensor& page, std::int64_t tokens) const {
  const std::int64_t groups = shape_.key_value_heads, dim = shape_.key_dim, size = shape_.page_tokens;
  const std::int64_t open = tokens % size;
  const Tensor copy = page.clone(), both = copy.view({layers_, 2, groups * dim * size});
  both.select(1, 0).unflatten(1, {groups, dim, size}).narrow(3, open, size - open).zero_();
  both.select(1, 1).unflatten(1, {groups, size, dim}).narrow(2, open, size - open).zero_();
  return copy;
}

std::vector<Page> GpuTextPages::pages(std::int64_t slot, std::int64_t tokens) {
  const Text& own = text(slot);
  const auto full = static_cast<std::size_t>(full_pages(tokens));
  std::vector<Page> all(static_cast<std::size_t>(pages_for(tokens)));
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i < full) all[i] = own[i]->outside.lock();
    if (!all[i]) missing.push_back(i);
  }
  for (std::size_t first = 0; first < missing.size(); first += kPagesPerCopy) {
    const auto some = std::span(missing).subspan(first, std::min<std::size_t>(kPagesPerCopy, missing.size() - first));
    std::vector<Tensor> numbers;
    for (const auto i : some) numbers.push_back(i < full ? own[i]->numbers : cut(own[i]->numbers, tokens));
    const Tensor copied = torch::stack(numbers).to(outside_type()).to(torch::kCPU);
    for (std::size_t n = 0; n < some.size(); ++n) {
      const auto page = std::make_shared<PageBytes>(outside_bytes());
      std::memcpy(page->data(), copied[static_cast<std::int64_t>(n)].data_ptr(), outside_bytes());
      all[some[n]] = page;
      if (some[n] >= full) continue;
      if (own[some[n]]->id != 0) page->id = own[some[n]]->id;
      note(page, own[some[n]]);
    }
  }
  return all;
}

// Returns the page in the GPU's memory of one outside of slots.
std::shared_ptr<GpuTextPages::GpuPage> GpuTextPages::inside(const Page& page) {
  if (const auto known = inside_.find(page->id); known != inside_.end()) {
    if (auto same = known->second.lock()) return same;
  }
  const auto fresh = new_page();
  fresh->numbers.copy_(torch::from_blob(const_cast<std::byte*>(page->data()), {page_numbers()}, outside_type()));
  note(page, fresh);
  return fresh;
}

// Remembers that a page in the GPU's memory and one outside of slots are the same.
void GpuTextPages::note(const Page& outside, const std::shared_ptr<GpuPage>& page) {
  page->outside = outside;
  page->id = outside->id;
  inside_[outside->id] = page;
  if (inside_.size() < most_inside_) return;
  std::erase_if(inside_, [](const auto& entry) { return entry.second.expired(); });
  most_inside_ = std::max<std::size_t>(2 * inside_.size(), 64);
}

void GpuTextPages::set(std::int64_t slot, std::int64_t tokens, std::span<const Page> pages) {
  Text own;
  for (const auto& page : pages.first(static_cast<std::size_t>(full_pages(tokens)))) own.push_back(inside(page));
  if (own.size() < pages.size()) {
    own.push_back(new_page());
    own.back()->numbers.copy_(
        torch::from_blob(const_cast<std::byte*>(pages.back()->data()), {page_numbers()}, outside_type()));
  }
  text(slot) = std::move(own);
  change(slot);
}

const Tensor& GpuTextPages::addresses() {
  std::size_t most = 0;
  for (const auto& pages : texts_) most = std::max(most, pages.size());
  if (std::cmp_greater(most, addresses_.size(1))) {
    addresses_ =
        torch::zeros({addresses_.size(0), static_cast<std::int64_t>(std::bit_ceil(most))}, addresses_.options());
    std::fill(changed_.begin(), changed_.end(), true);
  }
  for (std::size_t slot = 0; slot < texts_.size(); ++slot) {
    const bool changed = changed_[slot];
    changed_[slot] = false;
    if (!changed || texts_[slot].empty()) continue;
    std::vector<std::int64_t> row;
    for (const auto& page : texts_[slot]) row.push_back(reinterpret_cast<std::int64_t>(page->numbers.data_ptr()));
    addresses_[static_cast<std::int64_t>(slot)].narrow(0, 0, std::ssize(row)).copy_(torch::tensor(row, torch::kLong));
  }
  return addresses_;
}

}  // namespace efla::nn
