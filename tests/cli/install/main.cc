// One key written and read back with a decaying memory: o = (1 − e^{−βλ})/λ · (kᵀk) · v.
#include <efla/ops/delta.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  const efla::DeltaShape shape{.batch = 1, .tokens = 1, .heads = 1, .value_heads = 1, .key_dim = 2, .value_dim = 3};
  const std::vector<float> k{3.0F, 4.0F}, v{1.0F, -2.0F, 0.5F}, beta{0.1F};
  std::vector<float> o(3);

  efla::DeltaForward<float> problem;
  problem.shape = shape;
  problem.rule.step = efla::parse_step_size("exact");
  problem.rule.scale = 1.0;
  problem.q = problem.k = efla::View<const float, 4>::contiguous(k.data(), {1, 1, 1, 2});
  problem.v = efla::View<const float, 4>::contiguous(v.data(), {1, 1, 1, 3});
  problem.beta = efla::View<const float, 3>::contiguous(beta.data(), {1, 1, 1});
  problem.o = efla::View<float, 4>::contiguous(o.data(), {1, 1, 1, 3});
  efla::delta_forward(problem);

  for (int i = 0; i < 3; ++i) {
    const double expected = (1.0 - std::exp(-2.5)) * v[i];
    std::printf("o[%d] = %.7f, expected %.7f\n", i, o[i], expected);
    if (!(std::abs(o[i] - expected) <= 1e-6 * std::abs(expected))) return 1;
  }
  return 0;
}
