// Times the backward alone and after the forward, which saves states as in training. Compares gradients by chunks with
// gradients of the token recurrence in float32.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "bench/cuda/case.h"
#include "bench/cuda/timing.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/delta.h"

namespace efla::bench::cuda {

// The gradients of a case, on the device. Not in the anonymous namespace, because time_backward captures them.
template <class T>
struct Gradients {
  Both<T> dq, dk, dv, dbeta, derase_key;
  Both<float> dg;

  explicit Gradients(const Case<T>& c)
      : dq(c.q.host), dk(c.k.host), dv(c.v.host), dbeta(c.beta.host), derase_key(c.erase_key.host), dg(c.g.host) {}
};

namespace {

// Returns the relative RMS error of `got` against `expected`, both on the device.
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

}  // namespace

template <class T>
void time_backward(CaseRun& run, const std::string& name, Case<T>& c, const Row& row, const Rule& rule,
                   const std::string& algorithm) {
  const DeltaShape& s = c.shape;
  const bool chunks = algorithm == "chunk";
  Gradients<T> got(c), expected(c);
  Both<T> dout(random_values<T>(c.v.host.size(), 7));
  DeltaForward<T> forward = c.forward(rule, true);
  DeltaBackward<T> p;
  copy_inputs(forward, p);
  p.dout = View<const T, 4>::contiguous(dout.device, forward.v.extent);
  const auto with_states = [&](Gradients<T>& to, std::int64_t interval, auto&& call) {
    const std::array<std::int64_t, 5> extent{s.batch, s.chunks(interval), s.value_heads, s.key_dim, s.value_dim};
    View<float, 5> states = View<float, 5>::contiguous(nullptr, extent);
    const DeviceMemory memory(static_cast<std::size_t>(states.size()) * sizeof(float));
    states.data = static_cast<float*>(memory.data());
    forward.chunk_states = states;
    forward.saved = p.saved = {interval};
    gpu::recurrent_fwd(forward, nullptr);
    p.chunk_states = states;
    p.dq = View<T, 4>::contiguous(to.dq.device, p.q.extent);
    p.dk = View<T, 4>::contiguous(to.dk.device, p.k.extent);
    p.dv = View<T, 4>::contiguous(to.dv.device, p.v.extent);
    p.dbeta = View<T, 3>::contiguous(to.dbeta.device, p.beta.extent);
    if (p.erase_key) p.derase_key = View<T, 4>::contiguous(to.derase_key.device, p.k.extent);
    if (p.g) p.dg = View<float, 4>::contiguous(to.dg.device, p.g.extent);
    call();
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  };
  // Problems with more tokens are not compared, because the recurrence takes too long.
  const bool checked = chunks && s.batch * s.tokens * s.value_heads <= 300'000;
  if (checked) {
    with_states(expected, gpu::kRecurrentInterval, [&] {
      const DeviceMemory workspace(gpu::recurrent_bwd_workspace_bytes(s, rule.rule));
      gpu::recurrent_bwd(p, workspace.workspace(), nullptr);
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    });
  }
  const DeviceMemory workspace(chunks ? gpu::chunk_bwd_workspace_bytes(s, rule.rule)
                                      : gpu::recurrent_bwd_workspace_bytes(s, rule.rule)),
      forward_workspace(chunks ? gpu::chunk_fwd_workspace_bytes(s, rule.rule) : 0);
  with_states(got, chunks ? kTrainingInterval<T> : gpu::kRecurrentInterval, [&] {
    const auto backward = [&](cudaStream_t stream) {
      chunks ? gpu::chunk_bwd(p, workspace.workspace(), stream) : gpu::recurrent_bwd(p, workspace.workspace(), stream);
    };
    backward(nullptr);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::string errors = "null";
    bool right = true;
    if (checked) {
      errors.clear();
      for (const double error : {error_of(got.dq, expected.dq), error_of(got.dk, expected.dk),
                                 error_of(got.dv, expected.dv), error_of(got.dbeta, expected.dbeta),
                                 error_of(got.dg, expected.dg), error_of(got.derase_key, expected.derase_key)}) {
        errors += (errors.empty() ? "[" : ", ") + error_json(error);
        right = right && error <= kMaxError<T>;
      }
      errors += "]";
    }
    const std::string fields = ", \"shape\": \"" + row.name + "\", \"dim\": " + std::to_string(s.key_dim) +
                               ", \"rule\": \"" + rule.name + "\", \"algorithm\": \"" + algorithm +
                               "\", \"dtype\": \"" + std::string(DTypeOf<T>::name) + "\", \"errors\": " + errors;
    run.write_result(name, "\"op\": \"delta_backward\"" + fields, right,
                     [&] { return time_calls(run.options.repeats, backward); });
    run.write_result(name, "\"op\": \"delta_forward_backward\"" + fields, right, [&] {
      return time_calls(run.options.repeats, [&](cudaStream_t stream) {
        chunks ? gpu::chunk_fwd(forward, forward_workspace.workspace(), stream) : gpu::recurrent_fwd(forward, stream);
        backward(stream);
      });
    });
  });
}

template void time_backward(CaseRun&, const std::string&, Case<bfloat16>&, const Row&, const Rule&, const std::string&);
template void time_backward(CaseRun&, const std::string&, Case<float16>&, const Row&, const Rule&, const std::string&);

}  // namespace efla::bench::cuda
