// Times the chunkwise backward, and compares its gradients with the gradients of the token recurrence in float32.
#include <cmath>
#include <cstdio>
#include <vector>

#include "bench/cuda/case.h"
#include "efla/cuda/delta.h"

namespace efla::bench {
namespace {

constexpr std::int64_t kInterval = 1024;  // tokens between saved states

// The gradients of a case, on the device.
struct Gradients {
  Both<bfloat16> dq, dk, dv, dbeta;
  Both<float> dg;

  explicit Gradients(const Case& c) : dq(c.q.host), dk(c.k.host), dv(c.v.host), dbeta(c.beta.host), dg(c.g.host) {}
};

// The relative RMS error of `got` against `expected`, both on the device.
template <class T>
double error_of(Both<T>& got, Both<T>& expected) {
  if (got.host.empty()) return 0;
  got.download();
  expected.download();
  double error = 0, size = 0;
  for (std::size_t i = 0; i < got.host.size(); ++i) {
    const double difference = to_float(got.host[i]) - to_float(expected.host[i]);
    error += difference * difference;
    size += static_cast<double>(to_float(expected.host[i])) * to_float(expected.host[i]);
  }
  return std::sqrt(error / size);
}

class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) { check(cudaMalloc(&data_, bytes), "cudaMalloc"); }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  gpu::Workspace workspace() const { return {data_, bytes_}; }
  float* floats() const { return static_cast<float*>(data_); }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace

void time_backward(const Row& row, std::int64_t dim, const Rule& rule, int repeats, const std::string& commit,
                   const char* gpu_name) {
  Case c(row, dim, rule);
  const DeltaShape& s = c.shape;
  Gradients got(c), expected(c);
  Both<bfloat16> dout(random_values(c.v.host.size(), 7));
  DeltaForward<bfloat16> forward = c.forward(rule, true);
  DeltaBackward<bfloat16> p;
  p.shape = forward.shape;
  p.rule = forward.rule;
  p.q = forward.q;
  p.k = forward.k;
  p.v = forward.v;
  p.beta = forward.beta;
  p.g = forward.g;
  p.cu_seqlens = forward.cu_seqlens;
  p.dout = View<const bfloat16, 4>::contiguous(dout.device, forward.v.extent);
  const auto run = [&](Gradients& to, std::int64_t interval, auto&& call) {
    const std::array<std::int64_t, 5> extent{s.batch, s.chunks(interval), s.value_heads, s.key_dim, s.value_dim};
    View<float, 5> states = View<float, 5>::contiguous(nullptr, extent);
    const Memory memory(static_cast<std::size_t>(states.size()) * sizeof(float));
    states.data = memory.floats();
    DeltaForward<bfloat16> saving = forward;
    saving.chunk_states = states;
    saving.saved = p.saved = {interval, false};
    gpu::recurrent_fwd(saving, nullptr);
    p.chunk_states = states;
    p.dq = View<bfloat16, 4>::contiguous(to.dq.device, p.q.extent);
    p.dk = View<bfloat16, 4>::contiguous(to.dk.device, p.k.extent);
    p.dv = View<bfloat16, 4>::contiguous(to.dv.device, p.v.extent);
    p.dbeta = View<bfloat16, 3>::contiguous(to.dbeta.device, p.beta.extent);
    if (p.g) p.dg = View<float, 4>::contiguous(to.dg.device, p.g.extent);
    call();
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  };
  const bool checked = s.batch * s.tokens * s.value_heads <= 300'000;  // the others take the recurrence too long
  if (checked) {
    run(expected, gpu::kRecurrentInterval, [&] {
      const Memory workspace(gpu::recurrent_bwd_workspace_bytes(s, rule.rule));
      gpu::recurrent_bwd(p, workspace.workspace(), nullptr);
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    });
  }
  const Memory workspace(gpu::chunk_bwd_workspace_bytes(s)),
      forward_workspace(gpu::chunk_fwd_workspace_bytes(s, rule.rule));
  Times backward{}, together{};
  run(got, kInterval, [&] {
    gpu::chunk_bwd(p, workspace.workspace(), nullptr);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    backward = time_graph(repeats, [&](cudaStream_t stream) { gpu::chunk_bwd(p, workspace.workspace(), stream); });
    together = time_graph(repeats, [&](cudaStream_t stream) {
      gpu::chunk_fwd(forward, forward_workspace.workspace(), stream);
      gpu::chunk_bwd(p, workspace.workspace(), stream);
    });
  });
  char errors[100] = "null";
  if (checked) {
    std::snprintf(errors, sizeof(errors), "[%.2e, %.2e, %.2e, %.2e, %.2e]", error_of(got.dq, expected.dq),
                  error_of(got.dk, expected.dk), error_of(got.dv, expected.dv), error_of(got.dbeta, expected.dbeta),
                  error_of(got.dg, expected.dg));
  }
  std::printf(
      "{\"op\": \"delta_backward\", \"shape\": \"%s\", \"dim\": %d, \"rule\": \"%s\", \"algorithm\": \"chunk\", "
      "\"dtype\": \"bfloat16\", \"backward_ms\": %.4f, \"ms\": %.4f, \"ms_least\": %.4f, \"ms_p90\": %.4f, \"errors\": "
      "%s, \"repeats\": %d, \"gpu\": \"%s\", \"commit\": \"%s\"}\n",
      row.name, static_cast<int>(dim), rule.name, backward.median, together.median, together.least, together.p90,
      errors, repeats, gpu_name, commit.c_str());
  std::fflush(stdout);
}

}  // namespace efla::bench
