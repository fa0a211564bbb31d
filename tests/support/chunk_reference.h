// The chunk algorithm of EFLA (arXiv 2512.12602), equations 21 to 32, with the symbols of the paper, one value head
// after the other. The paper has one gain α and one key; here a_t is the erase gain, b_t the write gain, and the erase
// keys κ_t are the rows of E.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "efla/ref/elementwise.h"
#include "efla/ref/matrix.h"
#include "efla/ref/tokens.h"
#include "efla/rule/problem.h"

namespace efla::test {

// Computes one chunk: returns O (unscaled) and advances S.
inline ref::Matrix chunk_step(const std::vector<ref::Token>& tokens, ref::Matrix& s) {
  const auto c = static_cast<std::int64_t>(tokens.size());
  ref::Matrix q(c, s.rows), k(c, s.rows), e(c, s.rows), v(c, s.cols);
  std::vector<double> a, b;
  for (std::int64_t r = 0; r < c; ++r) {
    std::copy(tokens[r].q.begin(), tokens[r].q.end(), &q(r, 0));
    std::copy(tokens[r].k.begin(), tokens[r].k.end(), &k(r, 0));
    std::copy(tokens[r].erase_key.begin(), tokens[r].erase_key.end(), &e(r, 0));
    std::copy(tokens[r].v.begin(), tokens[r].v.end(), &v(r, 0));
    a.push_back(tokens[r].a);
    b.push_back(tokens[r].b);
  }
  // Equation 31, the UT transform. Its trailing diag(α) is applied to K and V in equation 32.
  const ref::Matrix t = inverse_of_unit_lower(lower_triangle(scale_rows(a, e * transpose(k)), false));
  const ref::Matrix w = t * scale_rows(a, e);                                         // equations 25 and 32
  const ref::Matrix u = t * scale_rows(b, v);                                         // equations 26 and 32
  const ref::Matrix new_values = u - w * s;                                           // of equations 27 and 28
  const ref::Matrix o = q * s + lower_triangle(q * transpose(k), true) * new_values;  // equation 30
  s = s + transpose(k) * new_values;                                                  // equation 29
  return o;
}

// Computes a forward in chunks of `chunk` ≥ 1 tokens with W, U and T written out. Takes, like the paper, only rules
// without decay; takes no packed sequences and saves no states. T is float, bfloat16 or double.
template <class T>
void chunk_fwd(const DeltaForward<T>& p, std::int64_t chunk) {
  const double scale = p.rule.scale_for(p.shape.key_dim);
  for (std::int64_t i_b = 0; i_b < p.shape.batch; ++i_b) {
    for (std::int64_t i_h = 0; i_h < p.shape.value_heads; ++i_h) {
      ref::Matrix s(p.shape.key_dim, p.shape.value_dim);
      for (std::int64_t i = 0; p.initial_state && i < s.rows; ++i) {
        for (std::int64_t j = 0; j < s.cols; ++j) s(i, j) = p.initial_state(i_b, i_h, i, j);
      }
      for (std::int64_t start = 0; start < p.shape.tokens; start += chunk) {
        std::vector<ref::Token> tokens;
        for (std::int64_t t = start; t < std::min(start + chunk, p.shape.tokens); ++t) {
          tokens.push_back(ref::read_token(p, i_b, t, i_h));
        }
        const ref::Matrix o = chunk_step(tokens, s);
        for (std::int64_t r = 0; r < o.rows; ++r) {
          for (std::int64_t j = 0; j < o.cols; ++j) p.o(i_b, start + r, i_h, j) = ref::round_to<T>(scale * o(r, j));
        }
      }
      for (std::int64_t i = 0; p.final_state && i < s.rows; ++i) {
        for (std::int64_t j = 0; j < s.cols; ++j) p.final_state(i_b, i_h, i, j) = static_cast<State<T>>(s(i, j));
      }
    }
  }
}

}  // namespace efla::test
