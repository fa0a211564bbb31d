// Times decode steps at the sizes at which other projects' kernels were timed.
#include <cmath>
#include <cstdio>
#include <vector>

#include "bench/cuda/timing.h"
#include "efla/cuda/delta.h"
#include "efla/ref/delta.h"

namespace efla::bench {
namespace {

constexpr std::int64_t kHeads = 16, kDim = 128;

struct StepRule {
  const char* name;
  DeltaRule rule;
};

std::vector<StepRule> step_rules() {
  DeltaRule efla, gdn, kda;
  efla.step = parse_step_size("exact");
  gdn.step = kda.step = parse_step_size("euler");
  gdn.qk_l2norm = kda.qk_l2norm = true;
  gdn.decay = Decay::scalar;
  kda.decay = Decay::channel;
  return {{"efla", efla}, {"gdn l2norm", gdn}, {"kda l2norm", kda}};
}

// One token of every batch entry, all of them with states in a pool.
template <class S>
struct StepCase {
  std::int64_t batch, tokens;
  Both<bfloat16> q, k, v, beta, o;
  Both<float> g;
  Both<S> states;

  StepCase(std::int64_t batch, std::int64_t tokens, const DeltaRule& rule)
      : batch(batch),
        tokens(tokens),
        q(random_values(rows() * kDim, 1)),
        k(random_values(rows() * kDim, 2)),
        v(random_values(rows() * kDim, 3)),
        beta(betas()),
        o(std::vector<bfloat16>(rows() * kDim)),
        g(gates(rule)),
        states(pool()) {}

  DeltaSteps<bfloat16, S> problem(const DeltaRule& rule, bool device) {
    const auto at = [&](auto& both) { return device ? both.device : both.host.data(); };
    const std::array<std::int64_t, 4> extent{batch, tokens, kHeads, kDim};
    DeltaSteps<bfloat16, S> p;
    p.shape = {batch, tokens, kHeads, kHeads, kDim, kDim, 0};
    p.rule = rule;
    p.q = View<const bfloat16, 4>::contiguous(at(q), extent);
    p.k = View<const bfloat16, 4>::contiguous(at(k), extent);
    p.v = View<const bfloat16, 4>::contiguous(at(v), extent);
    p.beta = View<const bfloat16, 3>::contiguous(at(beta), {batch, tokens, kHeads});
    if (rule.decay != Decay::none) {
      const std::int64_t channels = rule.decay == Decay::channel ? kDim : 1;
      p.g = View<const float, 4>::contiguous(at(g), {batch, tokens, kHeads, channels});
    }
    p.states = View<S, 4>::contiguous(at(states), {batch, kHeads, kDim, kDim});
    p.o = View<bfloat16, 4>::contiguous(at(o), extent);
    return p;
  }

 private:
  std::size_t rows() const { return batch * tokens * kHeads; }
  std::vector<bfloat16> betas() const {
    auto x = random_values(rows(), 4);
    for (auto& e : x) e = to_bfloat16(1 / (1 + std::exp(-to_float(e))));
    return x;
  }
  std::vector<float> gates(const DeltaRule& rule) const {
    std::vector<float> gates;
    if (rule.decay == Decay::none) return gates;
    for (const auto e : random_values(rows() * (rule.decay == Decay::channel ? kDim : 1), 5)) {
      gates.push_back(-std::log1p(std::exp(-to_float(e))) / 16);
    }
    return gates;
  }
  std::vector<S> pool() const {
    std::vector<S> states;
    for (const auto e : random_values(batch * kHeads * kDim * kDim, 6)) states.push_back(from_state<S>(to_float(e)));
    return states;
  }
};

// The relative RMS error of the outputs of the first batch entry against the float64 reference, of one call.
template <class S>
double step_error(StepCase<S>& c, const DeltaRule& rule) {
  const DeltaSteps<bfloat16, S> p = c.problem(rule, false);
  const auto doubles = [](const auto& view) {
    std::vector<double> values;
    for (std::int64_t i = 0; view && i < view.size() / view.extent[0]; ++i) values.push_back(to_float(view.data[i]));
    return values;
  };
  const std::vector<double> q = doubles(p.q), k = doubles(p.k), v = doubles(p.v), beta = doubles(p.beta),
                            g = doubles(p.g), state = doubles(p.states);
  std::vector<double> o(q.size());
  DeltaForward<double> one;
  one.shape = p.shape;
  one.shape.batch = 1;
  one.rule = rule;
  const std::array<std::int64_t, 4> extent{1, c.tokens, kHeads, kDim};
  one.q = View<const double, 4>::contiguous(q.data(), extent);
  one.k = View<const double, 4>::contiguous(k.data(), extent);
  one.v = View<const double, 4>::contiguous(v.data(), extent);
  one.beta = View<const double, 3>::contiguous(beta.data(), {1, c.tokens, kHeads});
  if (!g.empty()) one.g = View<const double, 4>::contiguous(g.data(), {1, c.tokens, kHeads, p.g.extent[3]});
  one.initial_state = View<const double, 4>::contiguous(state.data(), {1, kHeads, kDim, kDim});
  one.o = View<double, 4>::contiguous(o.data(), extent);
  ref::recurrent_fwd(one);
  gpu::step_fwd(c.problem(rule, true), nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  c.o.download();
  double error = 0, size = 0;
  for (std::size_t i = 0; i < o.size(); ++i) {
    error += (to_float(c.o.host[i]) - o[i]) * (to_float(c.o.host[i]) - o[i]);
    size += o[i] * o[i];
  }
  return std::sqrt(error / size);
}

// The median time of copying half of `bytes`, which reads and writes `bytes` together.
double copy_ms(int repeats, std::size_t bytes) {
  void *from = nullptr, *to = nullptr;
  check(cudaMalloc(&from, bytes / 2), "cudaMalloc");
  check(cudaMalloc(&to, bytes / 2), "cudaMalloc");
  const Times times = time_graph(repeats, [&](cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, bytes / 2, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  });
  check(cudaFree(from), "cudaFree");
  check(cudaFree(to), "cudaFree");
  return times.median;
}

template <class S>
void time_step(std::int64_t batch, std::int64_t tokens, const StepRule& rule, int repeats, const std::string& commit,
               const char* gpu_name) {
  StepCase<S> c(batch, tokens, rule.rule);
  const double error = step_error(c, rule.rule);
  const bool wrong = !(error <= 6e-3);
  const DeltaSteps<bfloat16, S> p = c.problem(rule.rule, true);
  const Times times = time_graph(repeats, [&](cudaStream_t stream) { gpu::step_fwd(p, stream); });
  const double copy = copy_ms(repeats, 2 * c.states.host.size() * sizeof(S));
  std::printf(
      "{\"op\": \"delta_step\", \"batch\": %d, \"tokens\": %d, \"heads\": 16, \"dim\": 128, \"rule\": \"%s\", "
      "\"state\": \"%s\", \"ms\": %.4f, \"ms_least\": %.4f, \"ms_p90\": %.4f, \"copy_ms\": %.4f, \"error\": %.2e, "
      "%s\"repeats\": %d, \"gpu\": \"%s\", \"commit\": \"%s\"}\n",
      static_cast<int>(batch), static_cast<int>(tokens), rule.name, sizeof(S) == 2 ? "bfloat16" : "float32",
      times.median, times.least, times.p90, copy, error, wrong ? "\"wrong\": true, " : "", repeats, gpu_name,
      commit.c_str());
  std::fflush(stdout);
}

}  // namespace

void time_steps(int repeats, const std::string& commit, const char* gpu_name) {
  for (const StepRule& rule : step_rules()) {
    for (const std::int64_t batch : {1, 64, 256}) {
      for (const std::int64_t tokens : {1, 4}) {
        time_step<float>(batch, tokens, rule, repeats, commit, gpu_name);
        time_step<bfloat16>(batch, tokens, rule, repeats, commit, gpu_name);
      }
    }
  }
}

}  // namespace efla::bench
