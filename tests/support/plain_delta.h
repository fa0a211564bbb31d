// The naive implementation in the operators' own precision: the token recurrence and its gradients in float32, with
// sums in the order of their terms. Its error against float64 is the yardstick for that of the kernels (compare.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "efla/rule/problem.h"

namespace efla::test {

// A state or its gradient, [K, V].
struct PlainState {
  std::int64_t rows, columns;
  std::vector<float> data;

  PlainState(std::int64_t rows, std::int64_t columns) : rows(rows), columns(columns), data(rows * columns) {}

  template <class View4>
  void read(const View4& view, std::int64_t i_b, std::int64_t i_h) {
    for (std::int64_t i = 0; view && i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) data[i * columns + j] = view(i_b, i_h, i, j);
    }
  }
  void write(const View<float, 4>& view, std::int64_t i_b, std::int64_t i_h) const {
    for (std::int64_t i = 0; view && i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) view(i_b, i_h, i, j) = data[i * columns + j];
    }
  }
  void scale_rows(const std::vector<float>& factors) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) data[i * columns + j] *= factors[i];
    }
  }
  void add_outer(const std::vector<float>& x, const std::vector<float>& y) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) data[i * columns + j] += x[i] * y[j];
    }
  }
  std::vector<float> transposed_times(const std::vector<float>& x) const {
    std::vector<float> y(columns);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) y[j] += data[i * columns + j] * x[i];
    }
    return y;
  }
  std::vector<float> times(const std::vector<float>& y) const {
    std::vector<float> x(rows);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) x[i] += data[i * columns + j] * y[j];
    }
    return x;
  }
};

inline float plain_dot(const std::vector<float>& x, const std::vector<float>& y) {
  float sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

struct PlainToken {
  std::vector<float> q, k, v, erase_key;
  float q_factor = 1, k_factor = 1;  // factors of the L2 norm
  Gain<float> gain{};
  float a = 0, b = 0;
  std::vector<float> decay;  // [K]
};

template <class T>
std::vector<float> plain_row(const View<T, 4>& view, std::int64_t i_b, std::int64_t t, std::int64_t i_h) {
  std::vector<float> row(view.extent[3]);
  for (std::int64_t i = 0; i < view.extent[3]; ++i) row[i] = to_float(view(i_b, t, i_h, i));
  return row;
}

inline float plain_normalise(std::vector<float>& x) {
  const float factor = 1 / std::sqrt(plain_dot(x, x) + static_cast<float>(kL2NormEpsilon));
  for (float& e : x) e *= factor;
  return factor;
}

template <class Problem>
PlainToken plain_token(const Problem& p, std::int64_t i_b, std::int64_t t, std::int64_t i_h) {
  PlainToken token;
  token.q = plain_row(p.q, i_b, t, i_h / p.shape.group());
  token.k = plain_row(p.k, i_b, t, i_h / p.shape.group());
  for (std::int64_t i = 0; i < p.shape.key_dim; ++i) {
    token.decay.push_back(p.g ? std::exp(p.g(i_b, t, i_h, p.rule.decay == Decay::channel ? i : 0)) : 1.0F);
  }
  token.v = plain_row(p.v, i_b, t, i_h);
  if (p.rule.qk_l2norm) {
    token.q_factor = plain_normalise(token.q);
    token.k_factor = plain_normalise(token.k);
  }
  token.erase_key = token.k;
  if (p.rule.two_keys) {
    token.erase_key = plain_row(p.erase_key, i_b, t, i_h / p.shape.group());
    for (float& e : token.erase_key) e *= token.k_factor;
  }
  const float beta = to_float(p.beta(i_b, t, i_h)), mu = plain_dot(token.erase_key, token.k);
  token.gain = p.rule.two_keys ? two_key_gain(p.rule.step, beta, mu) : gain(p.rule.step, beta, mu);
  token.a = static_cast<float>(p.rule.step.erase_scale) * token.gain.alpha;
  token.b = static_cast<float>(p.rule.step.write_scale) * token.gain.alpha;
  return token;
}

// Advances S by one token and returns u = b v − a (D S)ᵀκ.
inline std::vector<float> plain_advance(PlainState& s, const PlainToken& token) {
  s.scale_rows(token.decay);
  std::vector<float> u = s.transposed_times(token.erase_key);
  for (std::size_t j = 0; j < u.size(); ++j) u[j] = token.b * token.v[j] - token.a * u[j];
  s.add_outer(token.k, u);
  return u;
}

template <class T>
void plain_write(const std::vector<float>& row, const View<T, 4>& view, std::int64_t i_b, std::int64_t t,
                 std::int64_t i_h, float factor = 1) {
  for (std::size_t i = 0; i < row.size(); ++i) view(i_b, t, i_h, i) = from_state<T>(factor * row[i]);
}

template <class T>
void plain_forward(const DeltaForward<T>& p) {
  const auto scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  for (std::int64_t n = 0; n < p.shape.sequences(); ++n) {
    const Sequence at = sequence_of(p, n);
    for (std::int64_t i_h = 0; i_h < p.shape.value_heads; ++i_h) {
      PlainState s(p.shape.key_dim, p.shape.value_dim);
      s.read(p.initial_state, n, i_h);
      for (std::int64_t t = at.begin; t < at.end; ++t) {
        const PlainToken token = plain_token(p, at.i_b, t, i_h);
        plain_advance(s, token);
        plain_write(s.transposed_times(token.q), p.o, at.i_b, t, i_h, scale);
      }
      s.write(p.final_state, n, i_h);
    }
  }
}

inline void plain_normalise_bwd(const std::vector<float>& y, float factor, float along, std::vector<float>& dy) {
  for (std::size_t i = 0; i < y.size(); ++i) dy[i] = factor * (dy[i] - along * y[i]);
}

// [T][K] each. With one key erase_key stays zero.
struct PlainKeyGradients {
  std::vector<std::vector<float>> q, k, erase_key;
};

// Computes the gradients of one token, row r of the sums. Turns ds from the gradient of S_t into that of S_{t−1}, and
// adds to dq, dk and dκ.
template <class T>
void plain_token_backward(const DeltaBackward<T>& p, std::int64_t i_b, std::int64_t t, std::int64_t i_h,
                          const PlainState& before, const PlainState& after, const std::vector<float>& u,
                          PlainState& ds, PlainKeyGradients& sums, std::int64_t r) {
  const auto scale = static_cast<float>(p.rule.scale_for(p.shape.key_dim));
  const auto& step = p.rule.step;
  const PlainToken token = plain_token(p, i_b, t, i_h);
  std::vector<float> dout = plain_row(p.dout, i_b, t, i_h);
  for (float& e : dout) e *= scale;
  PlainState decayed = before;
  decayed.scale_rows(token.decay);
  const std::vector<float> dq = after.times(dout);
  ds.add_outer(token.q, dout);
  std::vector<float> dk = ds.times(u);
  std::vector<float> du = ds.transposed_times(token.k);
  const float da = -plain_dot(decayed.transposed_times(token.erase_key), du);
  const float db = plain_dot(token.v, du);
  plain_write(du, p.dv, i_b, t, i_h, token.b);
  for (float& e : du) e *= -token.a;
  std::vector<float> dkappa = decayed.times(du);
  ds.add_outer(token.erase_key, du);
  const float dalpha = static_cast<float>(step.erase_scale) * da + static_cast<float>(step.write_scale) * db;
  const float dlambda = dalpha * token.gain.dalpha_dlambda();
  for (std::size_t i = 0; i < dk.size(); ++i) {
    dk[i] += dlambda * token.erase_key[i];
    dkappa[i] += dlambda * token.k[i];
  }
  p.dbeta(i_b, t, i_h) = from_state<T>(dalpha * token.gain.dalpha_dbeta());
  float dg_sum = 0;
  for (std::int64_t i = 0; i < ds.rows; ++i) {
    sums.q[r][i] += dq[i];
    sums.k[r][i] += dk[i];
    (p.rule.two_keys ? sums.erase_key : sums.k)[r][i] += dkappa[i];
    float dg = 0;
    for (std::int64_t j = 0; j < ds.columns; ++j) dg += ds.data[i * ds.columns + j] * decayed.data[i * ds.columns + j];
    if (p.rule.decay == Decay::channel) p.dg(i_b, t, i_h, i) = dg;
    dg_sum += dg;
  }
  if (p.rule.decay == Decay::scalar) p.dg(i_b, t, i_h, 0) = dg_sum;
  ds.scale_rows(token.decay);
}

// Computes value head i_h of sequence n, and adds to the sums.
template <class T>
void plain_head_backward(const DeltaBackward<T>& p, const View<float, 4>& initial_state, std::int64_t n,
                         std::int64_t i_h, PlainKeyGradients& sums) {
  const Sequence at = sequence_of(p, n);
  std::vector<PlainState> states(1, PlainState(p.shape.key_dim, p.shape.value_dim));
  std::vector<std::vector<float>> us;
  states[0].read(initial_state, n, i_h);
  for (std::int64_t t = at.begin; t < at.end; ++t) {
    states.push_back(states.back());
    us.push_back(plain_advance(states.back(), plain_token(p, at.i_b, t, i_h)));
  }
  PlainState ds(p.shape.key_dim, p.shape.value_dim);
  ds.read(p.dfinal_state, n, i_h);
  for (std::int64_t t = at.end - 1; t >= at.begin; --t) {
    const std::int64_t r = t - at.begin;
    plain_token_backward(p, at.i_b, t, i_h, states[r], states[r + 1], us[r], ds, sums, r);
  }
  ds.write(p.dinitial_state, n, i_h);
}

// Computes all gradients. initial_state is that of the forward; chunk states are not read.
template <class T>
void plain_backward(const DeltaBackward<T>& p, const View<float, 4>& initial_state) {
  for (std::int64_t n = 0; n < p.shape.sequences(); ++n) {
    const Sequence at = sequence_of(p, n);
    const std::int64_t group = p.shape.group();
    for (std::int64_t i_q = 0; i_q < p.shape.heads; ++i_q) {
      const std::vector<std::vector<float>> zeros(at.end - at.begin, std::vector<float>(p.shape.key_dim));
      PlainKeyGradients sums{zeros, zeros, zeros};
      for (std::int64_t i = 0; i < group; ++i) plain_head_backward(p, initial_state, n, i_q * group + i, sums);
      for (std::int64_t t = at.begin; t < at.end; ++t) {
        const PlainToken token = plain_token(p, at.i_b, t, i_q * group);
        auto &dq = sums.q[t - at.begin], &dk = sums.k[t - at.begin], &dkappa = sums.erase_key[t - at.begin];
        if (p.rule.qk_l2norm) {
          plain_normalise_bwd(token.q, token.q_factor, plain_dot(token.q, dq), dq);
          plain_normalise_bwd(token.k, token.k_factor, plain_dot(token.k, dk) + plain_dot(token.erase_key, dkappa), dk);
        }
        plain_write(dq, p.dq, at.i_b, t, i_q);
        plain_write(dk, p.dk, at.i_b, t, i_q);
        if (p.rule.two_keys) plain_write(dkappa, p.derase_key, at.i_b, t, i_q, token.k_factor);
      }
    }
  }
}

}  // namespace efla::test
