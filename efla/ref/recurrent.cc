#include <vector>

#include "efla/ref/delta.h"
#include "efla/ref/matrix.h"
#include "efla/ref/tokens.h"

namespace efla::ref {
namespace {

// Sᵀ x.
std::vector<double> transposed_times(const Matrix& s, const std::vector<double>& x) {
  std::vector<double> y(s.cols, 0.0);
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) y[j] += s(i, j) * x[i];
  }
  return y;
}

// S y.
std::vector<double> times(const Matrix& s, const std::vector<double>& y) {
  std::vector<double> x(s.rows, 0.0);
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) x[i] += s(i, j) * y[j];
  }
  return x;
}

// S += x yᵀ.
void add_outer(Matrix& s, const std::vector<double>& x, const std::vector<double>& y) {
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) s(i, j) += x[i] * y[j];
  }
}

double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// u_t = b v − a S_{t−1}ᵀ k; S_t = S_{t−1} + k uᵀ. Returns u_t, leaves S_t in s.
std::vector<double> advance(Matrix& s, const Token& token) {
  std::vector<double> u = transposed_times(s, token.k);
  for (std::size_t j = 0; j < u.size(); ++j) u[j] = token.b * token.v[j] - token.a * u[j];
  add_outer(s, token.k, u);
  return u;
}

template <class S>
Matrix read_state(const View<const S, 4>& state, const DeltaShape& shape, std::int64_t i_b, std::int64_t i_h) {
  Matrix s(shape.key_dim, shape.value_dim);
  if (!state) return s;
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) s(i, j) = state(i_b, i_h, i, j);
  }
  return s;
}

template <class S>
void write_state(const Matrix& s, const View<S, 4>& state, std::int64_t i_b, std::int64_t i_h) {
  if (!state) return;
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) state(i_b, i_h, i, j) = static_cast<S>(s(i, j));
  }
}

// The view of one chunk's states.
template <class S>
View<S, 4> chunk_state(const View<S, 5>& states, std::int64_t chunk) {
  return {states.at(std::int64_t{0}, chunk),
          {states.extent[0], states.extent[2], states.extent[3], states.extent[4]},
          {states.stride[0], states.stride[2], states.stride[3], states.stride[4]}};
}

// The gradient of x/√(Σx² + ε) from that of its result y: (dy − y (y·dy)) · factor; dy as it is when the norm is off.
std::vector<double> l2_normalise_bwd(const std::vector<double>& y, std::vector<double> dy, double factor, bool on) {
  if (!on) return dy;
  const double along = dot(y, dy);
  for (std::size_t i = 0; i < y.size(); ++i) dy[i] = factor * (dy[i] - along * y[i]);
  return dy;
}

template <class T>
void head_bwd(const DeltaBackward<T>& p, std::int64_t i_b, std::int64_t i_h) {
  const std::int64_t tokens = p.shape.tokens;
  const double scale = p.rule.scale_for(p.shape.key_dim);
  std::vector<Matrix> states{read_state(chunk_state(p.chunk_states, 0), p.shape, i_b, i_h)};  // S_0 … S_T
  std::vector<std::vector<double>> us;
  for (std::int64_t t = 0; t < tokens; ++t) {
    states.push_back(states.back());
    us.push_back(advance(states.back(), read_token(p, i_b, t, i_h)));
  }
  Matrix ds = read_state(p.dfinal_state, p.shape, i_b, i_h);
  for (std::int64_t t = tokens - 1; t >= 0; --t) {
    const Token token = read_token(p, i_b, t, i_h);
    const Matrix& before = states[t];
    std::vector<double> dout;
    for (std::int64_t j = 0; j < p.shape.value_dim; ++j) dout.push_back(scale * to_float(p.dout(i_b, t, i_h, j)));
    std::vector<double> dq = times(states[t + 1], dout);  // o = scale Sᵀq
    add_outer(ds, token.q, dout);
    std::vector<double> dk = times(ds, us[t]);  // S_t = S_{t−1} + k uᵀ
    std::vector<double> du = transposed_times(ds, token.k);
    const std::vector<double> error = transposed_times(before, token.k);  // e = S_{t−1}ᵀ k; u = b v − a e
    const double da = -dot(error, du);
    const double db = dot(token.v, du);
    for (std::int64_t j = 0; j < p.shape.value_dim; ++j) p.dv(i_b, t, i_h, j) = round_to<T>(token.b * du[j]);
    for (double& e : du) e *= -token.a;  // de
    const std::vector<double> dk_erase = times(before, du);
    add_outer(ds, token.k, du);
    const double dalpha = p.rule.step.erase_scale * da + p.rule.step.write_scale * db;
    const double dlambda = dalpha * token.gain.dalpha_dlambda;
    for (std::size_t i = 0; i < dk.size(); ++i) dk[i] += dk_erase[i] + 2.0 * dlambda * token.k[i];
    p.dbeta(i_b, t, i_h) = round_to<T>(dalpha * token.gain.dalpha_dbeta);
    dq = l2_normalise_bwd(token.q, std::move(dq), token.q_factor, p.rule.qk_l2norm);
    dk = l2_normalise_bwd(token.k, std::move(dk), token.k_factor, p.rule.qk_l2norm);
    for (std::int64_t i = 0; i < p.shape.key_dim; ++i) {
      p.dq(i_b, t, i_h, i) = round_to<T>(dq[i]);
      p.dk(i_b, t, i_h, i) = round_to<T>(dk[i]);
    }
  }
  write_state(ds, p.dinitial_state, i_b, i_h);
}

}  // namespace

template <class T>
void recurrent_fwd(const DeltaForward<T>& p) {
  const double scale = p.rule.scale_for(p.shape.key_dim);
  for (std::int64_t i_b = 0; i_b < p.shape.batch; ++i_b) {
    for (std::int64_t i_h = 0; i_h < p.shape.heads; ++i_h) {
      Matrix s = read_state(p.initial_state, p.shape, i_b, i_h);
      for (std::int64_t t = 0; t < p.shape.tokens; ++t) {
        if (p.chunk_states && t % kChunk == 0) write_state(s, chunk_state(p.chunk_states, t / kChunk), i_b, i_h);
        const Token token = read_token(p, i_b, t, i_h);
        advance(s, token);
        const std::vector<double> o = transposed_times(s, token.q);
        for (std::int64_t j = 0; j < p.shape.value_dim; ++j) p.o(i_b, t, i_h, j) = round_to<T>(scale * o[j]);
      }
      write_state(s, p.final_state, i_b, i_h);
    }
  }
}

template <class T>
void recurrent_bwd(const DeltaBackward<T>& p) {
  for (std::int64_t i_b = 0; i_b < p.shape.batch; ++i_b) {
    for (std::int64_t i_h = 0; i_h < p.shape.heads; ++i_h) head_bwd(p, i_b, i_h);
  }
}

template <class T>
void step(const DeltaStep<T>& p) {
  const auto with_token_axis = [](const auto& view) {
    using V = std::remove_cvref_t<decltype(view)>;
    if constexpr (std::tuple_size_v<decltype(V::extent)> == 3) {
      return View<std::remove_pointer_t<decltype(V::data)>, 4>{view.data,
                                                               {view.extent[0], 1, view.extent[1], view.extent[2]},
                                                               {view.stride[0], 0, view.stride[1], view.stride[2]}};
    } else {
      return View<std::remove_pointer_t<decltype(V::data)>, 3>{
          view.data, {view.extent[0], 1, view.extent[1]}, {view.stride[0], 0, view.stride[1]}};
    }
  };
  DeltaForward<T> forward;
  forward.shape = p.shape;
  forward.rule = p.rule;
  forward.q = with_token_axis(p.q);
  forward.k = with_token_axis(p.k);
  forward.v = with_token_axis(p.v);
  forward.beta = with_token_axis(p.beta);
  forward.initial_state = p.state;  // read whole before final_state is written
  forward.o = with_token_axis(p.o);
  forward.final_state = p.state;
  recurrent_fwd(forward);
}

#define EFLA_INSTANTIATE(T)                             \
  template void recurrent_fwd(const DeltaForward<T>&);  \
  template void recurrent_bwd(const DeltaBackward<T>&); \
  template void step(const DeltaStep<T>&);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
EFLA_INSTANTIATE(double)
#undef EFLA_INSTANTIATE

}  // namespace efla::ref
