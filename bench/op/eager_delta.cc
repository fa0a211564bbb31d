#include "bench/op/eager_delta.h"

#include <cmath>
#include <vector>

#include "efla/rule/step_size.h"

namespace efla::bench {
namespace {

using at::indexing::Ellipsis;
using at::indexing::None;
using at::indexing::Slice;

// Returns [B, T, H, ...] as float32 chunks [B, H, NC, C, ...]. Tokens beyond T are zeros, which change nothing.
at::Tensor to_chunks(const at::Tensor& x, std::int64_t chunk) {
  at::Tensor y = x.to(at::kFloat).transpose(1, 2);
  const std::int64_t tokens = y.size(2), padding = (chunk - tokens % chunk) % chunk;
  if (padding > 0) {
    std::vector<std::int64_t> extents = y.sizes().vec();
    extents[2] = padding;
    y = at::cat({y, at::zeros(extents, y.options())}, 2);
  }
  std::vector<std::int64_t> extents = y.sizes().vec();
  extents[2] = chunk;
  extents.insert(extents.begin() + 2, (tokens + padding) / chunk);
  return y.reshape(extents);
}

// Returns (I + A)⁻¹ of a strictly lower triangular A, row by row: row i is −A_i + Σ_{j<i} (−A_ij) row j.
at::Tensor inverse_by_rows(const at::Tensor& a) {
  const std::int64_t size = a.size(-1);
  at::Tensor inverse = -a;
  for (std::int64_t i = 1; i < size; ++i) {
    const at::Tensor row = inverse.index({Ellipsis, i, Slice(None, i)}).clone();
    const at::Tensor above = inverse.index({Ellipsis, Slice(None, i), Slice(None, i)}).clone();
    inverse.index_put_({Ellipsis, i, Slice(None, i)}, row + (row.unsqueeze(-1) * above).sum(-2));
  }
  return inverse + at::eye(size, a.options());
}

struct WritingPair {
  at::Tensor w, u;  // [B, H, NC, C, K], [B, H, NC, C, V]
};

// Computes equations 31 and 32.
WritingPair ut_transform(const at::Tensor& k, const at::Tensor& v, const at::Tensor& beta, UtTransform transform) {
  const at::Tensor alpha = exact_alpha(k, beta).unsqueeze(-1);
  const at::Tensor alpha_k = alpha * k;
  const at::Tensor a = at::matmul(alpha_k, k.transpose(-1, -2)).tril(-1);
  if (transform == UtTransform::row_loop) {
    const at::Tensor inverse = inverse_by_rows(a);
    return {at::matmul(inverse, alpha_k), at::matmul(inverse, alpha * v)};
  }
  const at::Tensor right = at::cat({alpha_k, alpha * v}, -1);
  const at::Tensor solved =
      at::linalg_solve_triangular(a, right, /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
  const std::vector<at::Tensor> parts = solved.split_with_sizes({k.size(-1), v.size(-1)}, -1);
  return {parts[0], parts[1]};
}

}  // namespace

std::string name_of(const EagerForm& form) {
  return "chunk " + std::to_string(form.chunk) +
         (form.transform == UtTransform::row_loop ? ", row loop" : ", triangular solve");
}

at::Tensor exact_alpha(const at::Tensor& k, const at::Tensor& beta) {
  const at::Tensor lambda = (k * k).sum(-1).clamp_min(kMinKeyNormSquared);
  return -at::expm1(-beta * lambda) / lambda;
}

std::tuple<at::Tensor, at::Tensor> eager_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                               const at::Tensor& beta, const EagerForm& form) {
  const std::int64_t batch = k.size(0), tokens = k.size(1), heads = k.size(2), key_dim = k.size(3);
  const at::Tensor qc = to_chunks(q, form.chunk) * std::pow(static_cast<double>(key_dim), -0.5);
  const at::Tensor kc = to_chunks(k, form.chunk), vc = to_chunks(v, form.chunk);
  const auto [w, u] = ut_transform(kc, vc, to_chunks(beta, form.chunk), form.transform);
  const at::Tensor scores = at::matmul(qc, kc.transpose(-1, -2)).tril();

  at::Tensor state = at::zeros({batch, heads, key_dim, v.size(3)}, kc.options());
  std::vector<at::Tensor> out;
  for (std::int64_t n = 0; n < kc.size(2); ++n) {
    const at::Tensor written = u.select(2, n) - at::matmul(w.select(2, n), state);
    out.push_back(at::matmul(qc.select(2, n), state) + at::matmul(scores.select(2, n), written));  // equation 30
    state = state + at::matmul(kc.select(2, n).transpose(-1, -2), written);                        // equation 29
  }
  const at::Tensor o = at::cat(out, 2).slice(2, 0, tokens).transpose(1, 2);
  return {o.to(v.scalar_type()), state};
}

std::tuple<at::Tensor, at::Tensor> eager_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                              const at::Tensor& beta, const at::Tensor& state) {
  const at::Tensor kf = k.to(at::kFloat);
  const at::Tensor alpha = exact_alpha(kf, beta.to(at::kFloat)).unsqueeze(-1);
  const at::Tensor read = at::matmul(kf.unsqueeze(-2), state).squeeze(-2);
  const at::Tensor written = alpha * (v.to(at::kFloat) - read);
  const at::Tensor next = state + kf.unsqueeze(-1) * written.unsqueeze(-2);
  const double scale = std::pow(static_cast<double>(k.size(-1)), -0.5);
  const at::Tensor o = at::matmul((q.to(at::kFloat) * scale).unsqueeze(-2), next).squeeze(-2);
  return {o.to(v.scalar_type()), next};
}

}  // namespace efla::bench
