#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/base/text.h"
#include "efla/rule/attention.h"
#include "efla/rule/attention_step.h"
#include "efla/rule/check.h"
#include "efla/rule/rope.h"

namespace efla {
namespace {

constexpr const char* kAttention = "attention_forward";

void check_shape(const char* op, const AttentionShape& shape) {
  check_size(op, "key and value heads G", shape.key_value_heads, 1);
  check_size(op, "query heads H", shape.heads, 1);
  if (shape.heads % shape.key_value_heads != 0) {
    throw Error(op, "query heads H", std::to_string(shape.heads),
                "a multiple of G = " + std::to_string(shape.key_value_heads));
  }
  check_size(op, "key dim K", shape.key_dim, 1);
  check_size(op, "value dim V", shape.value_dim, 1);
  check_size(op, "page tokens P", shape.page_tokens, 1);
  if (shape.page_tokens % kAttentionBlock != 0) {
    throw Error(op, "page tokens P", std::to_string(shape.page_tokens),
                "a multiple of " + std::to_string(kAttentionBlock));
  }
}

// Checks that no page gets new tokens of two runs. Their pages are checked.
template <class S>
void check_written_pages(const AttentionForward<S>& p) {
  std::vector<std::pair<const S*, std::size_t>> written;  // a run's last page of keys, which it always writes
  for (std::size_t i = 0; i < p.runs.size(); ++i) {
    const AttentionRun<S>& run = p.runs[i];
    written.emplace_back(run.key_pages[static_cast<std::size_t>(p.shape.pages_for(run.begin + run.tokens) - 1)], i);
  }
  std::ranges::sort(written);
  const auto same = std::ranges::adjacent_find(written, {}, &std::pair<const S*, std::size_t>::first);
  if (same == written.end()) return;
  throw Error(kAttention, "runs[" + std::to_string(std::next(same)->second) + "].key_pages",
              "the page that runs[" + std::to_string(same->second) + "] writes", "one run per text");
}

// Checks that the pages for `tokens` tokens of a text are there.
template <class S>
void check_pages(const std::string& name, std::span<S* const> pages, std::int64_t needed, std::int64_t tokens) {
  if (static_cast<std::int64_t>(pages.size()) < needed) {
    throw Error(kAttention, name, std::to_string(pages.size()),
                "at least " + std::to_string(needed) + " pages for " + std::to_string(tokens) + " tokens");
  }
  for (std::int64_t page = 0; page < needed; ++page) {
    if (pages[static_cast<std::size_t>(page)] == nullptr) {
      throw Error(kAttention, name + "[" + std::to_string(page) + "]", "nothing", "a page");
    }
  }
}

}  // namespace

template <class S>
void validate(const AttentionForward<S>& p) {
  const AttentionShape& shape = p.shape;
  check_shape(kAttention, shape);
  if (std::isinf(p.scale)) throw Error(kAttention, "scale", value_text(p.scale), "a finite number");
  if (p.first_key < 0 || p.first_key >= kAttentionBlock) {
    throw Error(kAttention, "first_key", std::to_string(p.first_key), "0 to " + std::to_string(kAttentionBlock - 1));
  }
  for (std::size_t i = 0; i < p.runs.size(); ++i) {
    const AttentionRun<S>& run = p.runs[i];
    const std::string name = "runs[" + std::to_string(i) + "].";
    check_size(kAttention, (name + "begin").c_str(), run.begin, 0);
    check_size(kAttention, (name + "tokens").c_str(), run.tokens, 1);
    const std::int64_t tokens = run.begin + run.tokens, needed = shape.pages_for(tokens);
    check_pages(name + "key_pages", run.key_pages, needed, tokens);
    check_pages(name + "value_pages", run.value_pages, needed, tokens);
  }
  check_written_pages(p);
  const std::int64_t rows = p.rows();
  if (rows == 0) return;
  check_view(kAttention, "q", p.q, {rows, shape.heads, shape.key_dim});
  check_view(kAttention, "k", p.k, {rows, shape.key_value_heads, shape.key_dim});
  check_view(kAttention, "v", p.v, {rows, shape.key_value_heads, shape.value_dim});
  check_view(kAttention, "o", p.o, {rows, shape.heads, shape.value_dim});
}

template <class S>
void validate(const AttentionStep<S>& p, const Device& device) {
  constexpr const char* op = "attention_step";
  const AttentionShape& shape = p.shape;
  check_shape(op, shape);
  check_size(op, "value dim V", shape.value_dim, shape.key_dim, shape.key_dim);
  if (std::isinf(p.scale)) throw Error(op, "scale", value_text(p.scale), "a finite number");
  if (p.rotary < 0 || p.rotary > shape.key_dim || p.rotary % 2 != 0) {
    throw Error(op, "rotary R", std::to_string(p.rotary),
                "an even number from 0 to K = " + std::to_string(shape.key_dim));
  }
  if (!(p.theta > 1.0) || !std::isfinite(p.theta)) throw Error(op, "theta", value_text(p.theta), "a number above 1");
  const std::int64_t batch = p.qkv.extent[0];
  check_view(op, "qkv", p.qkv, {batch, p.value_column(shape.key_value_heads)});
  const bool per_head = p.q_norm.extent[0] == shape.key_dim && p.k_norm.extent[0] == shape.key_dim;
  check_view(op, "q_norm", p.q_norm, {per_head ? shape.key_dim : shape.heads * shape.key_dim});
  check_view(op, "k_norm", p.k_norm, {per_head ? shape.key_dim : shape.key_value_heads * shape.key_dim});
  check_view(op, "slots", p.slots, {batch});
  check_view(op, "positions", p.positions, {batch});
  check_view(op, "pages", p.table.pages, p.table.pages.extent);
  check_view(op, "arrivals", p.arrivals, {batch * shape.key_value_heads},
             device.is_cpu() ? Presence::optional : Presence::required);
  check_view(op, "o", p.o, {batch, shape.heads * shape.key_dim});
}

template <class S>
void validate(const PageCopy<S>& p, const Device& /*device*/) {
  constexpr const char* op = "copy_pages";
  check_shape(op, p.shape);
  const std::int64_t tokens = p.slots.extent[0];
  check_view(op, "slots", p.slots, {tokens});
  check_view(op, "positions", p.positions, {tokens});
  check_view(op, "pages", p.table.pages, p.table.pages.extent);
  check_view(op, "keys", p.keys, {tokens, p.shape.key_value_heads, p.shape.key_dim});
  check_view(op, "values", p.values, {tokens, p.shape.key_value_heads, p.shape.value_dim});
}

void validate(const RopeForward& p, const Device& device) {
  constexpr const char* op = "rope_forward";
  if (p.x.size() == 0) return;
  check_view(op, "x", p.x, p.x.extent);
  if (p.rotary < 0 || p.rotary > p.x.extent[2] || p.rotary % 2 != 0) {
    throw Error(op, "rotary R", std::to_string(p.rotary),
                "an even number from 0 to K = " + std::to_string(p.x.extent[2]));
  }
  if (!(p.theta > 1.0) || !std::isfinite(p.theta))
    throw Error(op, "theta", value_text(p.theta), "a finite number above 1");
  check_view(op, "positions", p.positions, {p.x.extent[0]});
  check_view(op, "y", p.y, p.x.extent);
  for (std::int64_t n = 0; device.is_cpu() && n < p.x.extent[0]; ++n) {
    if (p.positions(n) < 0) {
      throw Error(op, "positions[" + std::to_string(n) + "]", std::to_string(p.positions(n)), "0 or more");
    }
  }
}

template void validate(const AttentionForward<float>&);
template void validate(const AttentionForward<bfloat16>&);
template void validate(const AttentionStep<float>&, const Device&);
template void validate(const AttentionStep<bfloat16>&, const Device&);
template void validate(const PageCopy<float>&, const Device&);
template void validate(const PageCopy<bfloat16>&, const Device&);

}  // namespace efla
