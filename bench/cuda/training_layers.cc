// Times the layers around the delta rule, forward and backward, at the sizes of a training step of a model with 374
// million parameters: 16 sequences of 2048 tokens. Compares the results with the reference.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/cuda/case.h"
#include "bench/cuda/timing.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/layers/add_rms_norm.h"
#include "efla/cuda/layers/decay_gate.h"
#include "efla/cuda/layers/glu.h"
#include "efla/cuda/layers/rms_norm.h"
#include "efla/cuda/layers/short_conv.h"
#include "efla/ref/add_rms_norm.h"
#include "efla/ref/decay_gate.h"
#include "efla/ref/glu.h"
#include "efla/ref/rms_norm.h"
#include "efla/ref/short_conv.h"

namespace efla::bench::cuda {
namespace training_layers {
namespace {

constexpr std::int64_t kBatch = 16, kTokens = 2048, kHeads = 8, kDim = 128, kHidden = kHeads * kDim, kInner = 2816;
constexpr std::int64_t kConvChannels = 3 * kHidden, kTaps = 4;
constexpr std::int64_t kHostTokens = 64;                      // the first tokens, which the reference computes
constexpr std::int64_t kChecked = kHostTokens - (kTaps - 1);  // tokens whose gradients no later token changes

// A row of numbers per token. The host has the rows of the first kHostTokens tokens. The device has rows for all
// tokens, which repeat the rows of the host.
template <class T>
class Tensor {
 public:
  // `stream` selects random numbers of variance 1; 0: zeros, for results.
  Tensor(std::int64_t columns, std::uint64_t stream)
      : columns_(columns),
        host_(stream > 0 ? random_values<T>(kHostTokens * columns, stream) : std::vector<T>(kHostTokens * columns)),
        memory_(kBatch * kTokens * columns * sizeof(T)) {
    for (std::int64_t token = 0; token < kBatch * kTokens; token += kHostTokens) {
      check(cudaMemcpy(data(true) + token * columns, host_.data(), host_.size() * sizeof(T), cudaMemcpyHostToDevice),
            "cudaMemcpy");
    }
  }
  View<T, 2> rows(bool device, std::int64_t columns) {
    return View<T, 2>::contiguous(data(device),
                                  {(device ? kBatch * kTokens : kHostTokens) * columns_ / columns, columns});
  }
  View<T, 2> rows(bool device) { return rows(device, columns_); }
  View<T, 3> tokens(bool device) {
    return View<T, 3>::contiguous(data(device), {device ? kBatch : 1, device ? kTokens : kHostTokens, columns_});
  }
  std::size_t bytes() const { return kBatch * kTokens * columns_ * sizeof(T); }
  // Returns the relative RMS difference between the device's and the host's rows of the first kChecked tokens.
  double error() {
    std::vector<T> values(kChecked * columns_);
    check(cudaMemcpy(values.data(), data(true), values.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    double error = 0, size = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double right = to_float(host_[i]);
      error += (to_float(values[i]) - right) * (to_float(values[i]) - right);
      size += right * right;
    }
    return std::sqrt(error / size);
  }

 private:
  T* data(bool device) { return device ? static_cast<T*>(memory_.data()) : host_.data(); }

  std::int64_t columns_;
  std::vector<T> host_;
  DeviceMemory memory_;
};

using Narrow = Tensor<bfloat16>;
using Wide = Tensor<float>;

template <class T = const float>
View<T, 1> vector_of(Both<float>& both, bool device) {
  return View<T, 1>::contiguous(device ? both.device : both.host.data(), {static_cast<std::int64_t>(both.host.size())});
}
template <class T = const float>
View<T, 2> taps_of(Both<float>& both, bool device) {
  return View<T, 2>::contiguous(device ? both.device : both.host.data(), {kConvChannels, kTaps});
}

// Runs `reference` on the host's problem and `kernel` on the device's problem, compares `result`, and times `kernel`.
template <class Result, class Make, class Reference, class Kernel>
void time_layer(CaseRun& run, const std::string& name, std::size_t bytes, Result& result, Make&& make,
                Reference&& reference, Kernel&& kernel) {
  reference(make(false));
  const auto problem = make(true);
  kernel(problem, nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const double error = result.error();
  run.write_result(
      name, "\"op\": \"" + name + "\", \"bytes\": " + std::to_string(bytes) + ", \"error\": " + error_json(error),
      error <= kMaxError<>,
      [&] { return time_calls(run.options.repeats, [&](cudaStream_t stream) { kernel(problem, stream); }); });
}

void time_short_conv(CaseRun& run, const std::string& name, bool backward) {
  Narrow x(kConvChannels, 1), dy(kConvChannels, backward ? 2 : 0), result(kConvChannels, 0);
  Both<float> weight(random_values<float>(kConvChannels * kTaps, 3)), dweight(weight.host);
  if (!backward) {
    const auto make = [&](bool device) {
      return ShortConvForward<bfloat16>{x.tokens(device), taps_of(weight, device), result.tokens(device)};
    };
    time_layer(
        run, name, x.bytes() + result.bytes(), result, make, [](const auto& p) { ref::short_conv(p); },
        [](const auto& p, cudaStream_t stream) { gpu::short_conv(p, stream); });
    return;
  }
  const auto make = [&](bool device) {
    return ShortConvBackward<bfloat16>{x.tokens(device), taps_of(weight, device), dy.tokens(device),
                                       result.tokens(device), taps_of<float>(dweight, device)};
  };
  const DeviceMemory memory(gpu::short_conv_workspace_bytes(make(true)));
  time_layer(
      run, name, x.bytes() + dy.bytes() + result.bytes(), result, make, [](const auto& p) { ref::short_conv(p); },
      [&](const auto& p, cudaStream_t stream) { gpu::short_conv(p, memory.workspace(), stream); });
}

// Times the norm of a head's outputs, with or without a gate.
void time_rms_norm(CaseRun& run, const std::string& name, bool gated, bool backward) {
  Narrow x(kHidden, 1), dy(kHidden, backward ? 2 : 0), gate(kHidden, 3), dgate(kHidden, 0), result(kHidden, 0);
  Both<float> weight(random_values<float>(kDim, 4)), dweight(weight.host);
  const std::size_t gates = gated ? gate.bytes() : 0;
  if (!backward) {
    const auto make = [&](bool device) {
      RmsNormForward<bfloat16> p{x.rows(device, kDim), vector_of(weight, device), 1e-6F, result.rows(device, kDim)};
      if (gated) p.gate = gate.rows(device, kDim);
      return p;
    };
    time_layer(
        run, name, x.bytes() + gates + result.bytes(), result, make, [](const auto& p) { ref::rms_norm(p); },
        [](const auto& p, cudaStream_t stream) { gpu::rms_norm(p, stream); });
    return;
  }
  const auto make = [&](bool device) {
    RmsNormBackward<bfloat16> p{x.rows(device, kDim),  vector_of(weight, device), 1e-6F,
                                dy.rows(device, kDim), result.rows(device, kDim), vector_of<float>(dweight, device)};
    if (gated) {
      p.gate = gate.rows(device, kDim);
      p.dgate = dgate.rows(device, kDim);
    }
    return p;
  };
  const DeviceMemory memory(gpu::rms_norm_workspace_bytes(make(true)));
  time_layer(
      run, name, x.bytes() + dy.bytes() + 2 * gates + result.bytes(), result, make,
      [](const auto& p) { ref::rms_norm(p); },
      [&](const auto& p, cudaStream_t stream) { gpu::rms_norm(p, memory.workspace(), stream); });
}

void time_add_rms_norm(CaseRun& run, const std::string& name, bool backward) {
  Wide x(kHidden, 1), sum(kHidden, 0);
  Narrow branch(kHidden, 2), result(kHidden, 0);
  Both<float> weight(random_values<float>(kHidden, 4)), dweight(weight.host);
  if (!backward) {
    const auto make = [&](bool device) {
      return AddRmsNormForward<bfloat16>{x.rows(device), branch.rows(device), vector_of(weight, device),
                                         1e-6F,          sum.rows(device),    result.rows(device)};
    };
    time_layer(
        run, name, x.bytes() + branch.bytes() + sum.bytes() + result.bytes(), result, make,
        [](const auto& p) { ref::add_rms_norm(p); },
        [](const auto& p, cudaStream_t stream) { gpu::add_rms_norm(p, stream); });
    return;
  }
  Wide dx(kHidden, 0);
  const auto make = [&](bool device) {
    return AddRmsNormBackward<bfloat16>{x.rows(device),
                                        vector_of(weight, device),
                                        1e-6F,
                                        branch.rows(device),
                                        sum.rows(device),
                                        dx.rows(device),
                                        result.rows(device),
                                        vector_of<float>(dweight, device)};
  };
  const DeviceMemory memory(gpu::add_rms_norm_workspace_bytes(make(true)));
  time_layer(
      run, name, x.bytes() + branch.bytes() + sum.bytes() + dx.bytes() + result.bytes(), result, make,
      [](const auto& p) { ref::add_rms_norm(p); },
      [&](const auto& p, cudaStream_t stream) { gpu::add_rms_norm(p, memory.workspace(), stream); });
}

void time_glu(CaseRun& run, const std::string& name, bool backward) {
  Narrow gate(kInner, 1), up(kInner, 2), dy(kInner, backward ? 3 : 0), dup(kInner, 0), y(kInner, 0), result(kInner, 0);
  if (!backward) {
    const auto make = [&](bool device) {
      return GluForward<bfloat16>{gate.rows(device), up.rows(device), result.rows(device)};
    };
    time_layer(
        run, name, 3 * gate.bytes(), result, make, [](const auto& p) { ref::glu(p); },
        [](const auto& p, cudaStream_t stream) { gpu::glu(p, stream); });
    return;
  }
  const auto make = [&](bool device) {
    return GluBackward<bfloat16>{gate.rows(device),   up.rows(device),  dy.rows(device),
                                 result.rows(device), dup.rows(device), y.rows(device)};
  };
  time_layer(
      run, name, 6 * gate.bytes(), result, make, [](const auto& p) { ref::glu(p); },
      [](const auto& p, cudaStream_t stream) { gpu::glu(p, stream); });
}

// Times the gate with one decay per key channel.
void time_decay_gate(CaseRun& run, const std::string& name, bool backward) {
  Narrow z(kHidden, 1), dz(kHidden, 0);
  Wide g(kHidden, backward ? 2 : 0);  // g, or dg in the backward
  Both<float> bias(random_values<float>(kHidden, 3)), a_log(random_values<float>(kHeads, 4));
  if (!backward) {
    const auto make = [&](bool device) {
      return DecayGateForward<bfloat16>{
          z.rows(device), vector_of(bias, device), vector_of(a_log, device), DecayActivation::softplus,
          0.0F,           g.rows(device)};
    };
    time_layer(
        run, name, z.bytes() + g.bytes(), g, make, [](const auto& p) { ref::decay_gate(p); },
        [](const auto& p, cudaStream_t stream) { gpu::decay_gate(p, stream); });
    return;
  }
  Both<float> dbias(bias.host), da_log(a_log.host);
  const auto make = [&](bool device) {
    return DecayGateBackward<bfloat16>{
        z.rows(device), vector_of(bias, device), vector_of(a_log, device),        DecayActivation::softplus,       0.0F,
        g.rows(device), dz.rows(device),         vector_of<float>(dbias, device), vector_of<float>(da_log, device)};
  };
  const DeviceMemory memory(gpu::decay_gate_workspace_bytes(make(true)));
  time_layer(
      run, name, z.bytes() + g.bytes() + dz.bytes(), dz, make, [](const auto& p) { ref::decay_gate(p); },
      [&](const auto& p, cudaStream_t stream) { gpu::decay_gate(p, memory.workspace(), stream); });
}

}  // namespace
}  // namespace training_layers

void time_training_layer(CaseRun& run, const std::string& name, const std::string& layer, bool backward) {
  using namespace training_layers;
  if (layer == "short_conv") return time_short_conv(run, name, backward);
  if (layer == "add_rms_norm") return time_add_rms_norm(run, name, backward);
  if (layer == "glu") return time_glu(run, name, backward);
  if (layer == "decay_gate") return time_decay_gate(run, name, backward);
  time_rms_norm(run, name, layer == "rms_norm gated", backward);
}

}  // namespace efla::bench::cuda
