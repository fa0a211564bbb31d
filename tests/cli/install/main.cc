// Writes one key and reads it back: o = (1 − e^{−βλ})/λ · (kᵀk) · v, with λ = ‖k‖².
#include <efla/ops/delta.h>

#include <cmath>
#include <cstdio>

int main() {
  const float k[2] = {3, 4}, v[3] = {1, -2, 0.5F}, beta = 0.1F;
  float o[3];
  efla::DeltaForward<float> p;
  p.shape = {.batch = 1, .tokens = 1, .heads = 1, .value_heads = 1, .key_dim = 2, .value_dim = 3};
  p.rule.step = efla::parse_step_size("exact");
  p.rule.scale = 1.0;
  p.q = p.k = efla::View<const float, 4>::contiguous(k, {1, 1, 1, 2});
  p.v = efla::View<const float, 4>::contiguous(v, {1, 1, 1, 3});
  p.beta = efla::View<const float, 3>::contiguous(&beta, {1, 1, 1});
  p.o = efla::View<float, 4>::contiguous(o, {1, 1, 1, 3});
  efla::delta_forward(p);
  std::printf("%g %g %g\n", o[0], o[1], o[2]);  // 0.917915 -1.83583 0.458957
  return std::abs(o[1] - 2 * std::expm1(-2.5)) < 1e-6 ? 0 : 1;
}
