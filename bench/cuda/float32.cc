// Times the chunkwise kernels of float32 inputs and the token recurrence, and compares their results with each other.
#include <cuda_runtime_api.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "bench/cuda/case.h"
#include "bench/cuda/timing.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/delta.h"

namespace efla::bench::cuda {
namespace {

constexpr double kMaxFloat32Error = 1e-5;  // of one algorithm against the other

// The results of an algorithm, and what calls it.
class Run {
 public:
  Run(const Case<float>& c, DeltaForward<float> forward, const Both<float>& dout, bool chunks)
      : o(c.o.host),
        dq(c.q.host),
        dk(c.k.host),
        dv(c.v.host),
        dbeta(c.beta.host),
        dg(c.g.host),
        derase_key(c.erase_key.host),
        chunks_(chunks),
        forward_(forward),
        interval_(chunks ? kTrainingInterval<float> : gpu::kRecurrentInterval),
        extent_{c.shape.batch, c.shape.chunks(interval_), c.shape.value_heads, c.shape.key_dim, c.shape.value_dim},
        states_(static_cast<std::size_t>(View<float, 5>::contiguous(nullptr, extent_).size()) * sizeof(float)),
        forward_workspace_(chunks ? gpu::chunk_float32_fwd_workspace_bytes(c.shape, forward.rule) : 0),
        backward_workspace_(chunks ? gpu::chunk_float32_bwd_workspace_bytes(c.shape, forward.rule)
                                   : gpu::recurrent_bwd_workspace_bytes(c.shape, forward.rule)) {
    forward_.o = View<float, 4>::contiguous(o.device, forward.o.extent);
    saving_ = forward_;
    saving_.saved = {interval_};
    saving_.chunk_states = View<float, 5>::contiguous(static_cast<float*>(states_.data()), extent_);
    backward_ = backward_of(saving_);
    backward_.dout = View<const float, 4>::contiguous(dout.device, forward.v.extent);
    backward_.dq = View<float, 4>::contiguous(dq.device, forward.q.extent);
    backward_.dk = View<float, 4>::contiguous(dk.device, forward.k.extent);
    backward_.dv = View<float, 4>::contiguous(dv.device, forward.v.extent);
    backward_.dbeta = View<float, 3>::contiguous(dbeta.device, forward.beta.extent);
    if (forward.erase_key) backward_.derase_key = View<float, 4>::contiguous(derase_key.device, forward.k.extent);
    if (forward.g) backward_.dg = View<float, 4>::contiguous(dg.device, forward.g.extent);
  }

  void forward(cudaStream_t stream) const { forward(forward_, stream); }
  void train(cudaStream_t stream) const {
    forward(saving_, stream);
    if (chunks_) {
      gpu::chunk_float32_bwd(backward_, backward_workspace_.workspace(), stream);
    } else {
      gpu::recurrent_bwd(backward_, backward_workspace_.workspace(), stream);
    }
  }

  Both<float> o, dq, dk, dv, dbeta, dg, derase_key;

 private:
  void forward(const DeltaForward<float>& p, cudaStream_t stream) const {
    chunks_ ? gpu::chunk_float32_fwd(p, forward_workspace_.workspace(), stream) : gpu::recurrent_fwd(p, stream);
  }

  bool chunks_;
  DeltaForward<float> forward_, saving_;
  DeltaBackward<float> backward_;
  std::int64_t interval_;
  std::array<std::int64_t, 5> extent_;
  DeviceMemory states_, forward_workspace_, backward_workspace_;
};

// The relative RMS distance of two results.
double distance(Both<float>& x, Both<float>& y) {
  if (x.host.empty()) return 0;
  x.download();
  y.download();
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.host.size(); ++i) {
    error += std::pow(static_cast<double>(x.host[i]) - y.host[i], 2);
    size += static_cast<double>(y.host[i]) * y.host[i];
  }
  return std::sqrt(error / size);
}

}  // namespace

void time_float32(CaseRun& run, const std::string& name, const Row& row, std::int64_t dim, const Rule& rule,
                  const std::string& algorithm) {
  Case<float> c(row, dim, rule);
  const Both<float> dout(random_values<float>(c.v.host.size(), 7));
  Run timed(c, c.forward(rule, true), dout, algorithm == "chunk"),
      other(c, c.forward(rule, true), dout, algorithm != "chunk");
  for (const Run* one : {&timed, &other}) one->train(nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::string errors;
  bool right = true;
  for (const double error : {distance(timed.o, other.o), distance(timed.dq, other.dq), distance(timed.dk, other.dk),
                             distance(timed.dv, other.dv), distance(timed.dbeta, other.dbeta),
                             distance(timed.dg, other.dg), distance(timed.derase_key, other.derase_key)}) {
    errors += (errors.empty() ? "[" : ", ") + error_json(error);
    right = right && error <= kMaxFloat32Error;
  }
  const std::string fields = ", \"shape\": \"" + row.name + "\", \"dim\": " + std::to_string(dim) + ", \"rule\": \"" +
                             rule.name + "\", \"algorithm\": \"" + algorithm +
                             "\", \"dtype\": \"float32\", \"differences\": " + errors + "]";
  run.write_result(name, "\"op\": \"delta_forward\"" + fields, right, [&] {
    return time_calls(run.options.repeats, [&](cudaStream_t stream) { timed.forward(stream); });
  });
  run.write_result(name, "\"op\": \"delta_forward_backward\"" + fields, right,
                   [&] { return time_calls(run.options.repeats, [&](cudaStream_t stream) { timed.train(stream); }); });
}

}  // namespace efla::bench::cuda
