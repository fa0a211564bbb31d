// The token recurrence (EFLA, equation 20), its gradients and the decode step in float64, one value head after the
// other. docs/ops/delta_rule.md has the equations of the gradients, whose symbols are used here.
#include <numeric>
#include <vector>

#include "efla/ref/delta.h"
#include "efla/ref/elementwise.h"
#include "efla/ref/matrix.h"
#include "efla/ref/tokens.h"

namespace efla::ref {
namespace {

// Returns Sᵀ x.
std::vector<double> transposed_times(const Matrix& s, const std::vector<double>& x) {
  std::vector<double> y(s.cols, 0.0);
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) y[j] += s(i, j) * x[i];
  }
  return y;
}

// Returns S y.
std::vector<double> times(const Matrix& s, const std::vector<double>& y) {
  std::vector<double> x(s.rows, 0.0);
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) x[i] += s(i, j) * y[j];
  }
  return x;
}

// Computes S += x yᵀ.
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

// Computes S̃_t = D S_{t−1} in place.
void decay(Matrix& s, const Token& token) {
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) s(i, j) *= token.decay[i];
  }
}

// Computes u_t = b v − a S̃_tᵀ κ and S_t = S̃_t + k uᵀ. Returns u_t and leaves S_t in s.
std::vector<double> advance(Matrix& s, const Token& token) {
  decay(s, token);
  std::vector<double> u = transposed_times(s, token.erase_key);
  for (std::size_t j = 0; j < u.size(); ++j) u[j] = token.b * token.v[j] - token.a * u[j];
  add_outer(s, token.k, u);
  return u;
}

template <class S>
Matrix read_state(const View<const S, 4>& state, const DeltaShape& shape, std::int64_t i_b, std::int64_t i_h) {
  Matrix s(shape.key_dim, shape.value_dim);
  if (!state) return s;
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) s(i, j) = to_float(state(i_b, i_h, i, j));
  }
  return s;
}

template <class S>
void write_state(const Matrix& s, const View<S, 4>& state, std::int64_t i_b, std::int64_t i_h) {
  if (!state) return;
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.cols; ++j) state(i_b, i_h, i, j) = round_to<S>(s(i, j));
  }
}

// Returns the view of the saved states of one chunk.
template <class S>
View<S, 4> chunk_state(const View<S, 5>& states, std::int64_t chunk) {
  return {states.at(std::int64_t{0}, chunk),
          {states.extent[0], states.extent[2], states.extent[3], states.extent[4]},
          {states.stride[0], states.stride[2], states.stride[3], states.stride[4]}};
}

// Replaces the gradient dy of a result y = x · factor, factor = 1/√(Σx² + ε), by the gradient of x, (dy − y along) ·
// factor. `along` is y·dy, plus the products of the other results of the same factor with their gradients.
void l2_normalise_bwd(const std::vector<double>& y, double factor, double along, std::vector<double>& dy) {
  for (std::size_t i = 0; i < y.size(); ++i) dy[i] = factor * (dy[i] - along * y[i]);
}

using Rows = std::vector<std::vector<double>>;

// Sums over the value heads of a query head, [T, K] each. With one key erase_key stays zero, and k has both gradients.
struct KeyGradients {
  Rows q, k, erase_key;

  KeyGradients(std::int64_t tokens, std::int64_t key_dim)
      : q(tokens, std::vector<double>(key_dim)), k(q), erase_key(q) {}
};

// Computes the gradients of one value head. Adds the head's dq, dk and dκ to the sums.
template <class T>
void head_bwd(const DeltaBackward<T>& p, std::int64_t n, std::int64_t i_h, KeyGradients& sums) {
  const Sequence at = sequence_of(p, n);
  const double scale = p.rule.scale_for(p.shape.key_dim);
  const MicroSteps steps{steps_per_token(p)};
  Matrix s(p.shape.key_dim, p.shape.value_dim);
  if (at.begin < at.end) {
    s = read_state(chunk_state(p.chunk_states, at.first_chunk), p.shape, at.i_b, i_h);
  }
  std::vector<Matrix> states{s};  // S_0 … S_T
  Rows us;
  for (std::int64_t t = at.begin; t < at.end; ++t) {
    us.push_back(advance(s, read_token(p, at.i_b, t, i_h)));
    states.push_back(s);
  }
  Matrix ds = read_state(p.dfinal_state, p.shape, n, i_h);
  for (std::int64_t t = at.end - 1; t >= at.begin; --t) {
    const std::int64_t r = t - at.begin;
    const Token token = read_token(p, at.i_b, t, i_h);
    Matrix decayed = states[r];
    decay(decayed, token);
    std::vector<double> dout(p.shape.value_dim);
    for (std::int64_t j = 0; steps.is_read(t) && j < p.shape.value_dim; ++j) {
      dout[j] = scale * to_float(p.dout(at.i_b, steps.token(t), i_h, j));
    }
    const std::vector<double> dq = times(states[r + 1], dout);  // o = scale Sᵀq
    add_outer(ds, token.q, dout);
    std::vector<double> dk = times(ds, us[r]);  // S_t = S̃_t + k uᵀ
    std::vector<double> du = transposed_times(ds, token.k);
    const std::vector<double> error = transposed_times(decayed, token.erase_key);  // e = S̃_tᵀ κ; u = b v − a e
    const double da = -dot(error, du);
    const double db = dot(token.v, du);
    for (std::int64_t j = 0; j < p.shape.value_dim; ++j) p.dv(at.i_b, t, i_h, j) = round_to<T>(token.b * du[j]);
    for (double& e : du) e *= -token.a;  // de
    const std::vector<double> dk_erase = times(decayed, du);
    add_outer(ds, token.erase_key, du);
    const double dalpha = p.rule.step.erase_scale * da + p.rule.step.write_scale * db;
    const double dlambda = dalpha * token.gain.dalpha_dlambda();
    p.dbeta(at.i_b, t, i_h) = round_to<T>(dalpha * token.gain.dalpha_dbeta());
    auto& erase_sum = p.rule.two_keys ? sums.erase_key[r] : sums.k[r];
    for (std::size_t i = 0; i < dk.size(); ++i) {  // λ = κᵀk
      sums.q[r][i] += dq[i];
      sums.k[r][i] += dk[i] + dlambda * token.erase_key[i];
      erase_sum[i] += dk_erase[i] + dlambda * token.k[i];
    }
    std::vector<double> dg(p.shape.key_dim);  // S̃ = diag(e^g) S_{t−1}, so dg = Σ_j dS̃ ∘ S̃
    for (std::int64_t i = 0; i < ds.rows; ++i) {
      for (std::int64_t j = 0; j < ds.cols; ++j) dg[i] += ds(i, j) * decayed(i, j);
    }
    if (p.rule.decay == Decay::scalar) dg[0] = std::accumulate(dg.begin(), dg.end(), 0.0);
    for (std::int64_t i = 0; p.dg && steps.decays(t) && i < p.dg.extent[3]; ++i) {
      p.dg(at.i_b, steps.token(t), i_h, i) = static_cast<State<T>>(dg[i]);
    }
    decay(ds, token);
  }
  write_state(ds, p.dinitial_state, n, i_h);
}

}  // namespace

template <class T>
void recurrent_fwd(const DeltaForward<T>& p) {
  const double scale = p.rule.scale_for(p.shape.key_dim);
  const MicroSteps steps{steps_per_token(p)};
  for (std::int64_t n = 0; n < p.shape.sequences(); ++n) {
    const Sequence at = sequence_of(p, n);
    for (std::int64_t i_h = 0; i_h < p.shape.value_heads; ++i_h) {
      Matrix s = read_state(p.initial_state, p.shape, n, i_h);
      for (std::int64_t t = at.begin; t < at.end; ++t) {
        if (p.chunk_states && (t - at.begin) % p.saved.interval == 0) {
          write_state(s, chunk_state(p.chunk_states, at.chunk(t)), at.i_b, i_h);
        }
        const Token token = read_token(p, at.i_b, t, i_h);
        advance(s, token);
        if (!steps.is_read(t)) continue;
        const std::vector<double> o = transposed_times(s, token.q);
        for (std::int64_t j = 0; j < p.shape.value_dim; ++j) {
          p.o(at.i_b, steps.token(t), i_h, j) = round_to<T>(scale * o[j]);
        }
      }
      write_state(s, p.final_state, n, i_h);
    }
  }
}

template <class T>
void recurrent_bwd(const DeltaBackward<T>& p) {
  const MicroSteps steps{steps_per_token(p)};
  for (std::int64_t n = 0; n < p.shape.sequences(); ++n) {
    const Sequence at = sequence_of(p, n);
    for (std::int64_t i_q = 0; i_q < p.shape.heads; ++i_q) {
      KeyGradients sums(at.end - at.begin, p.shape.key_dim);
      for (std::int64_t i = 0; i < p.shape.group(); ++i) head_bwd(p, n, i_q * p.shape.group() + i, sums);
      for (std::int64_t t = at.begin; t < at.end; ++t) {
        const Token token = read_token(p, at.i_b, t, i_q * p.shape.group());
        auto &dq = sums.q[t - at.begin], &dk = sums.k[t - at.begin], &dkappa = sums.erase_key[t - at.begin];
        if (p.rule.qk_l2norm) {
          l2_normalise_bwd(token.q, token.q_factor, dot(token.q, dq), dq);
          l2_normalise_bwd(token.k, token.k_factor, dot(token.k, dk) + dot(token.erase_key, dkappa), dk);
        }
        for (std::int64_t i = 0; i < p.shape.key_dim; ++i) {
          if (steps.is_read(t)) p.dq(at.i_b, steps.token(t), i_q, i) = round_to<T>(dq[i]);
          p.dk(at.i_b, t, i_q, i) = round_to<T>(dk[i]);
          if (p.rule.two_keys) p.derase_key(at.i_b, t, i_q, i) = round_to<T>(token.k_factor * dkappa[i]);
        }
      }
    }
  }
}

template <class T, class S>
void step(const DeltaStep<T, S>& p) {
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
  forward.erase_key = with_token_axis(p.erase_key);
  forward.v = with_token_axis(p.v);
  forward.beta = with_token_axis(p.beta);
  forward.g = with_token_axis(p.g);
  forward.o = with_token_axis(p.o);
  // The states of the batch entries in the type that the forward takes.
  std::vector<State<T>> copy(p.shape.batch * p.state.size() / p.state.extent[0]);
  const std::int64_t heads = p.state.extent[1], key_dim = p.state.extent[2], value_dim = p.state.extent[3];
  const auto state = View<State<T>, 4>::contiguous(copy.data(), {p.shape.batch, heads, key_dim, value_dim});
  const auto for_each_element = [&](auto&& f) {
    for (std::int64_t i_b = 0; i_b < p.shape.batch; ++i_b) {
      const std::int64_t slot = p.slot(i_b);
      if (slot < 0) continue;
      for (std::int64_t i_h = 0; i_h < heads; ++i_h) {
        for (std::int64_t i_k = 0; i_k < key_dim; ++i_k) {
          for (std::int64_t i_v = 0; i_v < value_dim; ++i_v) f(state(i_b, i_h, i_k, i_v), p.state(slot, i_h, i_k, i_v));
        }
      }
    }
  };
  for_each_element([](State<T>& to, const S& from) { to = static_cast<State<T>>(to_float(from)); });
  forward.initial_state = state;  // recurrent_fwd reads each state before it writes it
  forward.final_state = state;
  recurrent_fwd(forward);
  for_each_element([](const State<T>& from, S& to) { to = from_state<S>(static_cast<State<S>>(from)); });
  for (std::int64_t i_b = 0; i_b < p.shape.batch; ++i_b) {
    for (std::int64_t i_h = 0; i_h < heads && p.slot(i_b) < 0; ++i_h) {
      for (std::int64_t i_v = 0; i_v < value_dim; ++i_v) p.o(i_b, i_h, i_v) = T{};
    }
  }
}

#define EFLA_INSTANTIATE(T)                             \
  template void recurrent_fwd(const DeltaForward<T>&);  \
  template void recurrent_bwd(const DeltaBackward<T>&); \
  template void step(const DeltaStep<T, State<T>>&);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
EFLA_INSTANTIATE(float16)
EFLA_INSTANTIATE(double)
#undef EFLA_INSTANTIATE
template void step(const DeltaStep<float, bfloat16>&);
template void step(const DeltaStep<bfloat16, bfloat16>&);
template void step(const DeltaStep<float16, bfloat16>&);

}  // namespace efla::ref
