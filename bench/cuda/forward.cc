// Times the forward. Compares outputs with the float64 reference.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/cuda/case.h"
#include "bench/cuda/timing.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/delta.h"
#include "efla/ref/delta.h"

namespace efla::bench::cuda {
namespace {

// Returns the relative RMS error of the outputs of some heads and sequences against the float64 reference.
template <class T>
double sampled_error(Case<T>& c, const Rule& rule) {
  c.o.download();
  const DeltaForward<T> all = c.forward(rule, false);
  double error = 0, size = 0;
  const std::int64_t last = c.shape.sequences() - 1, head = c.shape.value_heads - 1;
  for (const auto& [n, i_h] : {std::pair{std::int64_t{0}, std::int64_t{0}}, {last, head}, {last / 2, head / 2}}) {
    const Sequence at = sequence_of(all, n);
    const std::int64_t state = c.shape.key_dim * c.shape.value_dim, i_q = i_h / c.shape.group();
    const std::int64_t tokens = std::min(at.end - at.begin, std::min<std::int64_t>(4096, (1 << 26) / state));
    const std::int64_t channels = all.g ? all.g.extent[3] : 0;
    DeltaForward<double> one;
    one.shape = {1, tokens, 1, 1, c.shape.key_dim, c.shape.value_dim, 0};
    one.rule = rule.rule;
    std::vector<double> q, k, erase_key, v, beta, g, o(tokens * c.shape.value_dim);
    for (std::int64_t t = at.begin; t < at.begin + tokens; ++t) {
      for (std::int64_t i = 0; i < c.shape.key_dim; ++i) {
        q.push_back(to_float(all.q(at.i_b, t, i_q, i)));
        k.push_back(to_float(all.k(at.i_b, t, i_q, i)));
        if (rule.rule.two_keys) erase_key.push_back(to_float(all.erase_key(at.i_b, t, i_q, i)));
      }
      for (std::int64_t j = 0; j < c.shape.value_dim; ++j) v.push_back(to_float(all.v(at.i_b, t, i_h, j)));
      beta.push_back(to_float(all.beta(at.i_b, t, i_h)));
      for (std::int64_t i = 0; i < channels; ++i) g.push_back(all.g(at.i_b, t, i_h, i));
    }
    one.q = View<const double, 4>::contiguous(q.data(), {1, tokens, 1, c.shape.key_dim});
    one.k = View<const double, 4>::contiguous(k.data(), {1, tokens, 1, c.shape.key_dim});
    if (rule.rule.two_keys) {
      one.erase_key = View<const double, 4>::contiguous(erase_key.data(), {1, tokens, 1, c.shape.key_dim});
    }
    one.v = View<const double, 4>::contiguous(v.data(), {1, tokens, 1, c.shape.value_dim});
    one.beta = View<const double, 3>::contiguous(beta.data(), {1, tokens, 1});
    if (all.g) one.g = View<const double, 4>::contiguous(g.data(), {1, tokens, 1, channels});
    one.o = View<double, 4>::contiguous(o.data(), {1, tokens, 1, c.shape.value_dim});
    ref::recurrent_fwd(one);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t j = 0; j < c.shape.value_dim; ++j) {
        const double difference = to_float(all.o(at.i_b, at.begin + t, i_h, j)) - one.o(0, t, 0, j);
        error += difference * difference;
        size += one.o(0, t, 0, j) * one.o(0, t, 0, j);
      }
    }
  }
  return std::sqrt(error / size);
}

// The names of ChunkKernel, in the order of its values.
constexpr std::string_view kKernels[] = {"chunk", "portable", "sweep", "fused"};

}  // namespace

template <class T>
void time_forward(CaseRun& run, const std::string& name, Case<T>& c, const Row& row, const Rule& rule,
                  const std::string& algorithm, std::int64_t interval) {
  DeltaForward<T> p = c.forward(rule, true);
  const DeltaShape& s = c.shape;
  if (interval > 0) {
    p.saved = {interval};
    p.chunk_states =
        View<float, 5>::contiguous(nullptr, {s.batch, s.chunks(interval), s.value_heads, s.key_dim, s.value_dim});
  }
  const DeviceMemory states(static_cast<std::size_t>(p.chunk_states.size()) * (interval > 0 ? sizeof(float) : 0));
  p.chunk_states.data = static_cast<float*>(states.data());
  const auto kernel = static_cast<gpu::ChunkKernel>(std::find(std::begin(kKernels), std::end(kKernels), algorithm) -
                                                    std::begin(kKernels));
  const DeviceMemory workspace(gpu::chunk_fwd_workspace_bytes(s, rule.rule));
  const auto call = [&](cudaStream_t stream) {
    if (algorithm == "recurrent") return gpu::recurrent_fwd(p, stream);
    gpu::chunk_fwd(p, workspace.workspace(), stream, kernel);
  };
  c.o.poison();
  call(nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const double error = sampled_error(c, rule);
  run.write_result(name,
                   "\"op\": \"delta_forward\", \"shape\": \"" + row.name + "\", \"dim\": " + std::to_string(s.key_dim) +
                       ", \"rule\": \"" + rule.name + "\", \"algorithm\": \"" + algorithm + "\", \"dtype\": \"" +
                       std::string(DTypeOf<T>::name) + "\", \"interval\": " + std::to_string(interval) +
                       ", \"error\": " + error_json(error),
                   error <= kMaxError<T>, [&] { return time_calls(run.options.repeats, call); });
}

template void time_forward(CaseRun&, const std::string&, Case<bfloat16>&, const Row&, const Rule&, const std::string&,
                           std::int64_t);
template void time_forward(CaseRun&, const std::string&, Case<float16>&, const Row&, const Rule&, const std::string&,
                           std::int64_t);

}  // namespace efla::bench::cuda
