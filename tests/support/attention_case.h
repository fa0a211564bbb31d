// Texts with pages, and runs of attention over them, for the tests of the operator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/base/threads.h"
#include "efla/ops/layers/attention.h"
#include "tests/support/tensor.h"

namespace efla::test {

// The pages of one text. Elements that were never written are NaN, and a kernel that uses them gets a wrong result.
template <class S>
class TextPages {
 public:
  TextPages(const AttentionShape& shape, std::int64_t tokens) {
    const auto nan = from_state<S>(std::numeric_limits<float>::quiet_NaN());
    const auto pages = static_cast<std::size_t>(shape.pages_for(tokens));
    keys_.assign(pages, std::vector<S>(static_cast<std::size_t>(shape.key_page_elements()), nan));
    values_.assign(pages, std::vector<S>(static_cast<std::size_t>(shape.value_page_elements()), nan));
    point();
  }
  TextPages(const TextPages& other)
      : keys_(other.keys_), values_(other.values_), key_pages(other.key_pages), value_pages(other.value_pages) {
    point();
  }
  TextPages& operator=(const TextPages&) = delete;

  // Replaces the first `pages` pages by the pages of another text.
  void share(const TextPages& other, std::size_t pages) {
    std::copy_n(other.key_pages.begin(), pages, key_pages.begin());
    std::copy_n(other.value_pages.begin(), pages, value_pages.begin());
  }

  AttentionRun<S> run(std::int64_t begin, std::int64_t tokens) const { return {begin, tokens, key_pages, value_pages}; }

 private:
  std::vector<std::vector<S>> keys_, values_;

  void point() {
    key_pages.clear();
    value_pages.clear();
    for (auto& page : keys_) key_pages.push_back(page.data());
    for (auto& page : values_) value_pages.push_back(page.data());
  }

 public:
  std::vector<S*> key_pages, value_pages;
};

// The queries, keys and values of all tokens of a text, and the outputs.
struct TextRows {
  Tensor<float, 3> q, k, v, o;
};

inline std::vector<double> normal_numbers(std::int64_t count, Random& random, double size = 1.0) {
  std::vector<double> numbers;
  for (std::int64_t i = 0; i < count; ++i) numbers.push_back(size * random.normal());
  return numbers;
}

// Returns a text of random tokens. With the default scale the scores have a standard deviation of about 2, because
// queries have 2 and keys have 1.
inline TextRows random_text(const AttentionShape& shape, std::int64_t tokens, Random& random,
                            Layout layout = Layout::contiguous) {
  TextRows text{Tensor<float, 3>({tokens, shape.heads, shape.key_dim}, layout),
                Tensor<float, 3>({tokens, shape.key_value_heads, shape.key_dim}, layout),
                Tensor<float, 3>({tokens, shape.key_value_heads, shape.value_dim}, layout),
                Tensor<float, 3>({tokens, shape.heads, shape.value_dim}, layout)};
  text.q.assign(normal_numbers(text.q.view().size(), random, 2.0));
  text.k.assign(normal_numbers(text.k.view().size(), random));
  text.v.assign(normal_numbers(text.v.view().size(), random));
  return text;
}

// Returns rows [begin, begin + count) of a view.
template <class T>
View<T, 3> rows_of(View<T, 3> view, std::int64_t begin, std::int64_t count) {
  view.data = view.at(begin);
  view.extent[0] = count;
  return view;
}

// Returns the problem of tokens [begin, begin + tokens) of a text. `run` must outlive it.
template <class S>
AttentionForward<S> problem_of(const AttentionShape& shape, TextRows& text, const AttentionRun<S>& run) {
  AttentionForward<S> p;
  p.shape = shape;
  p.runs = {&run, 1};
  p.q = rows_of(text.q.view(), run.begin, run.tokens);
  p.k = rows_of(text.k.view(), run.begin, run.tokens);
  p.v = rows_of(text.v.view(), run.begin, run.tokens);
  p.o = rows_of(text.o.view(), run.begin, run.tokens);
  return p;
}

// Computes tokens [begin, begin + tokens) of a text.
template <class S>
void run_attention(const AttentionShape& shape, TextRows& text, const TextPages<S>& pages, std::int64_t begin,
                   std::int64_t tokens, const RunOptions& options = {}) {
  const AttentionRun<S> run = pages.run(begin, tokens);
  attention_forward(problem_of(shape, text, run), options);
}

}  // namespace efla::test
