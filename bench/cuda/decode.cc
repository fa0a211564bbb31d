// Times decode steps, beside the copy of as many bytes as their states have.
#include <cuda_runtime_api.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/cuda/case.h"
#include "bench/cuda/timing.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/delta.h"
#include "efla/ref/delta.h"

namespace efla::bench::cuda {
namespace {

constexpr std::int64_t kHeads = 16;

// The tokens of every batch entry, and a pool of states.
template <class S>
struct StepCase {
  std::int64_t batch, tokens, dim;
  Both<bfloat16> q, k, v, beta, o;
  Both<float> g;
  Both<bfloat16> erase_key;
  Both<S> states;

  StepCase(std::int64_t batch, std::int64_t tokens, std::int64_t dim, const Rule& rule)
      : batch(batch),
        tokens(tokens),
        dim(dim),
        q(random_values(rows() * dim, 1)),
        k(random_values(rows() * dim, 2)),
        v(random_values(rows() * dim, 3)),
        beta(betas()),
        o(std::vector<bfloat16>(rows() * dim)),
        g(random_gates(rows(), dim, rule)),
        erase_key(random_erase_keys(k.host, rule)),
        states(pool()) {}

  DeltaSteps<bfloat16, S> problem(const DeltaRule& rule, bool device) {
    const auto at = [&](auto& both) { return device ? both.device : both.host.data(); };
    const std::array<std::int64_t, 4> extent{batch, tokens, kHeads, dim};
    DeltaSteps<bfloat16, S> p;
    p.shape = {batch, tokens, kHeads, kHeads, dim, dim, 0};
    p.rule = rule;
    p.q = View<const bfloat16, 4>::contiguous(at(q), extent);
    p.k = View<const bfloat16, 4>::contiguous(at(k), extent);
    p.v = View<const bfloat16, 4>::contiguous(at(v), extent);
    if (rule.two_keys) p.erase_key = View<const bfloat16, 4>::contiguous(at(erase_key), extent);
    p.beta = View<const bfloat16, 3>::contiguous(at(beta), {batch, tokens, kHeads});
    if (rule.decay != Decay::none) {
      const std::int64_t channels = rule.decay == Decay::channel ? dim : 1;
      p.g = View<const float, 4>::contiguous(at(g), {batch, tokens, kHeads, channels});
    }
    p.states = View<S, 4>::contiguous(at(states), {batch, kHeads, dim, dim});
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
  std::vector<S> pool() const {
    std::vector<S> states;
    for (const auto e : random_values(batch * kHeads * dim * dim, 6)) states.push_back(from_state<S>(to_float(e)));
    return states;
  }
};

// Returns the relative RMS error of the outputs of one call, for the first batch entry, against the float64 reference.
template <class S>
double step_error(StepCase<S>& c, const DeltaRule& rule) {
  const DeltaSteps<bfloat16, S> p = c.problem(rule, false);
  const auto doubles = [](const auto& view) {
    std::vector<double> values;
    for (std::int64_t i = 0; view && i < view.size() / view.extent[0]; ++i) values.push_back(to_float(view.data[i]));
    return values;
  };
  const std::vector<double> q = doubles(p.q), k = doubles(p.k), erase_key = doubles(p.erase_key), v = doubles(p.v),
                            beta = doubles(p.beta), g = doubles(p.g), state = doubles(p.states);
  std::vector<double> o(q.size());
  DeltaForward<double> one;
  one.shape = p.shape;
  one.shape.batch = 1;
  one.rule = rule;
  const std::array<std::int64_t, 4> extent{1, c.tokens, kHeads, c.dim};
  one.q = View<const double, 4>::contiguous(q.data(), extent);
  one.k = View<const double, 4>::contiguous(k.data(), extent);
  if (rule.two_keys) one.erase_key = View<const double, 4>::contiguous(erase_key.data(), extent);
  one.v = View<const double, 4>::contiguous(v.data(), extent);
  one.beta = View<const double, 3>::contiguous(beta.data(), {1, c.tokens, kHeads});
  if (!g.empty()) one.g = View<const double, 4>::contiguous(g.data(), {1, c.tokens, kHeads, p.g.extent[3]});
  one.initial_state = View<const double, 4>::contiguous(state.data(), {1, kHeads, c.dim, c.dim});
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

// Returns the median time in milliseconds of copying bytes / 2 bytes, which reads and writes `bytes` bytes together.
double copy_ms(int repeats, std::size_t bytes) {
  const DeviceMemory from(bytes / 2), to(bytes / 2);
  return time_calls(repeats,
                    [&](cudaStream_t stream) {
                      check(cudaMemcpyAsync(to.data(), from.data(), bytes / 2, cudaMemcpyDeviceToDevice, stream),
                            "cudaMemcpyAsync");
                    })
      .replay.median;
}

template <class S>
void time_case(CaseRun& run, const std::string& name, std::int64_t batch, std::int64_t tokens, std::int64_t dim,
               const Rule& rule) {
  StepCase<S> c(batch, tokens, dim, rule);
  const double error = step_error(c, rule.rule),
               copy = copy_ms(run.options.repeats, 2 * c.states.host.size() * sizeof(S));
  // Every token rounds a state in bfloat16 again.
  const double most = kMaxError<> * (sizeof(S) == 2 ? std::sqrt(static_cast<double>(tokens)) : 1.0);
  const DeltaSteps<bfloat16, S> p = c.problem(rule.rule, true);
  run.write_result(
      name,
      "\"op\": \"delta_step\", \"batch\": " + std::to_string(batch) + ", \"tokens\": " + std::to_string(tokens) +
          ", \"heads\": " + std::to_string(kHeads) + ", \"dim\": " + std::to_string(dim) + ", \"rule\": \"" +
          rule.name + "\", \"state\": \"" + (sizeof(S) == 2 ? "bfloat16" : "float32") +
          "\", \"copy_ms\": " + milliseconds(copy) + ", \"error\": " + error_json(error),
      error <= most,
      [&] { return time_calls(run.options.repeats, [&](cudaStream_t stream) { gpu::step_fwd(p, stream); }); });
}

}  // namespace

void time_step(CaseRun& run, const std::string& name, std::int64_t batch, std::int64_t tokens, std::int64_t dim,
               const Rule& rule, bool narrow) {
  if (narrow) return time_case<bfloat16>(run, name, batch, tokens, dim, rule);
  time_case<float>(run, name, batch, tokens, dim, rule);
}

}  // namespace efla::bench::cuda
