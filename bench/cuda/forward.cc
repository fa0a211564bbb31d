// Times the delta rule's forward on a GPU at the sizes at which other projects' kernels were timed, and checks every
// result before its time is printed.
//
//     efla_bench_cuda [--rows 1,2,…] [--repeats N] [--algorithms chunk,portable,sweep,fused,recurrent,
//                     backward,step]
//                     [--interval TOKENS] [--commit TEXT]
//
// One JSON object per line: the median, least and 90th percentile of N replays of a CUDA graph, in ms, each after the
// L2 cache was overwritten; the relative RMS error of sampled heads against float64. With --interval the forward saves
// the state after every TOKENS tokens of a sequence, a multiple of 64. `step` times decode steps (decode.cc) and does
// not depend on --rows, `backward` the chunkwise backward (backward.cc).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "bench/cuda/case.h"
#include "bench/cuda/timing.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/delta.h"
#include "efla/ref/delta.h"

namespace {

using namespace efla;
using bench::Case, bench::kRows, bench::Row, bench::Rule, bench::rules, bench::time_graph, bench::Times;
using gpu::check;

// The view's head i_h alone, of tokens [begin, begin + tokens) of batch entry i_b.
template <class View>
View head_of(View view, std::int64_t i_b, std::int64_t begin, std::int64_t tokens, std::int64_t i_h) {
  view.data = view.at(i_b, begin, i_h);
  view.extent[0] = view.extent[2] = 1;
  view.extent[1] = tokens;
  return view;
}

// The relative RMS error of some heads of some sequences against the reference.
double sampled_error(Case& c, const Rule& rule) {
  c.o.download();
  const DeltaForward<bfloat16> all = c.forward(rule, false);
  double error = 0, size = 0;
  const std::int64_t last = c.shape.sequences() - 1, head = c.shape.value_heads - 1;
  for (const auto& [n, i_h] : {std::pair{std::int64_t{0}, std::int64_t{0}}, {last, head}, {last / 2, head / 2}}) {
    const Sequence at = sequence_of(all, n);
    const std::int64_t tokens = std::min<std::int64_t>(at.end - at.begin, 4096), i_q = i_h / c.shape.group();
    const std::int64_t channels = all.g ? all.g.extent[3] : 0;
    DeltaForward<double> one;
    one.shape = {1, tokens, 1, 1, c.shape.key_dim, c.shape.value_dim, 0};
    one.rule = rule.rule;
    std::vector<double> q, k, v, beta, g, o(tokens * c.shape.value_dim);
    for (std::int64_t t = at.begin; t < at.begin + tokens; ++t) {
      for (std::int64_t i = 0; i < c.shape.key_dim; ++i) {
        q.push_back(to_float(all.q(at.i_b, t, i_q, i)));
        k.push_back(to_float(all.k(at.i_b, t, i_q, i)));
      }
      for (std::int64_t j = 0; j < c.shape.value_dim; ++j) v.push_back(to_float(all.v(at.i_b, t, i_h, j)));
      beta.push_back(to_float(all.beta(at.i_b, t, i_h)));
      for (std::int64_t i = 0; i < channels; ++i) g.push_back(all.g(at.i_b, t, i_h, i));
    }
    one.q = View<const double, 4>::contiguous(q.data(), {1, tokens, 1, c.shape.key_dim});
    one.k = View<const double, 4>::contiguous(k.data(), {1, tokens, 1, c.shape.key_dim});
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

// Names of ChunkKernel, in its order.
constexpr std::string_view kKernels[] = {"chunk", "portable", "sweep", "fused"};

struct Options {
  std::string rows = "1,2,3,4,5,6,7,8", algorithms = "chunk", commit = "?", dims = "128",
              rules = "deltanet l2norm,efla,gdn,kda";
  int repeats = 30, interval = 0;
};

bool lists(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

void run(const Options& options, const char* gpu_name, int index, Case& c, const Rule& rule,
         const std::string& algorithm) {
  const Row& row = kRows[index];
  const std::int64_t dim = c.shape.key_dim;
  DeltaForward<bfloat16> p = c.forward(rule, true);
  void* states = nullptr;
  if (options.interval > 0) {
    const DeltaShape& s = c.shape;
    p.saved = {options.interval, false};
    p.chunk_states = View<float, 5>::contiguous(
        nullptr, {s.batch, s.chunks(options.interval), s.value_heads, s.key_dim, s.value_dim});
    check(cudaMalloc(&states, static_cast<std::size_t>(p.chunk_states.size()) * sizeof(float)), "cudaMalloc");
    p.chunk_states.data = static_cast<float*>(states);
  }
  const auto found = std::find(std::begin(kKernels), std::end(kKernels), algorithm);
  const bool chunks = found != std::end(kKernels);
  const auto kernel = static_cast<gpu::ChunkKernel>(found - std::begin(kKernels));
  const std::size_t bytes = chunks ? gpu::chunk_fwd_workspace_bytes(c.shape, rule.rule) : 0;
  void* workspace = nullptr;
  if (bytes > 0) check(cudaMalloc(&workspace, bytes), "cudaMalloc");
  const auto call = [&](cudaStream_t stream) {
    if (chunks) return gpu::chunk_fwd(p, {workspace, bytes}, stream, kernel);
    gpu::recurrent_fwd(p, stream);
  };
  c.o.poison();
  call(nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const double error = sampled_error(c, rule);
  if (!(error <= 6e-3)) {
    std::printf(
        "{\"row\": %d, \"rule\": \"%s\", \"dim\": %d, \"algorithm\": \"%s\", \"error\": \"%.2e\", \"wrong\": true}\n",
        index + 1, rule.name, static_cast<int>(dim), algorithm.c_str(), error);
  } else {
    const Times times = time_graph(options.repeats, call);
    std::printf(
        "{\"op\": \"delta_forward\", \"row\": %d, \"shape\": \"%s\", \"dim\": %d, \"rule\": \"%s\", \"algorithm\": "
        "\"%s\", "
        "\"dtype\": \"bfloat16\", \"interval\": %d, \"ms\": %.4f, \"ms_least\": %.4f, \"ms_p90\": %.4f, \"error\": "
        "%.2e, \"repeats\": "
        "%d, "
        "\"gpu\": \"%s\", \"commit\": \"%s\"}\n",
        index + 1, row.name, static_cast<int>(dim), rule.name, algorithm.c_str(), options.interval, times.median,
        times.least, times.p90, error, options.repeats, gpu_name, options.commit.c_str());
  }
  std::fflush(stdout);
  check(cudaFree(workspace), "cudaFree");
  check(cudaFree(states), "cudaFree");
}

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--rows")
      options.rows = value;
    else if (name == "--dims")
      options.dims = value;
    else if (name == "--rules")
      options.rules = value;
    else if (name == "--algorithms")
      options.algorithms = value;
    else if (name == "--commit")
      options.commit = value;
    else if (name == "--interval")
      options.interval = std::atoi(value.c_str());
    else if (name == "--repeats")
      options.repeats = std::max(1, std::atoi(value.c_str()));
    else {
      std::fprintf(stderr,
                   "efla_bench_cuda: unknown option %s; options are --rows, --dims, --rules, --algorithms, --repeats, "
                   "--interval, --commit\n",
                   name.c_str());
      return 2;
    }
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  for (int index = 0; index < static_cast<int>(std::size(kRows)); ++index) {
    if (!lists(options.rows, std::to_string(index + 1))) continue;
    for (const std::int64_t dim : {64, 128}) {
      if (!lists(options.dims, std::to_string(dim))) continue;
      for (const Rule& rule : rules()) {
        if (!lists(options.rules, rule.name)) continue;
        Case c(kRows[index], dim, rule);
        for (const char* algorithm : {"chunk", "portable", "sweep", "fused", "recurrent"}) {
          if (lists(options.algorithms, algorithm)) run(options, properties.name, index, c, rule, algorithm);
        }
        if (lists(options.algorithms, "backward")) {
          bench::time_backward(kRows[index], dim, rule, options.repeats, options.commit, properties.name);
        }
      }
    }
  }
  if (lists(options.algorithms, "step")) bench::time_steps(options.repeats, options.commit, properties.name);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "efla_bench_cuda: %s\n", error.what());
  return 1;
}
