// The tensors of a case on the GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/delta.h"
#include "efla/rule/problem.h"
#include "tests/support/delta_case.h"
#include "tests/support/delta_cases.h"
#include "tests/support/tensor.h"

namespace efla::test {

// Returns why no kernel can run here, or "" where one can.
inline std::string why_no_gpu() {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess) return cudaGetErrorString(code);
  return devices > 0 ? "" : "no device";
}

// Whether the chunkwise backward takes a case on a Hopper GPU; the forward, if its rows are aligned.
inline bool chunks_take(const DeltaCase& c) {
  return !gpu::divides_keys(c.shape()) || (c.key_dim % 8 == 0 && c.value_dim % 8 == 0 && c.decay != Decay::channel);
}
inline bool has_aligned_rows(const DeltaCase& c) {
  return c.layout == Layout::contiguous || c.layout == Layout::head_major;
}

// Returns the cases that the chunkwise kernels take with float16 inputs.
inline std::vector<DeltaCase> taken_in_float16(const std::vector<DeltaCase>& cases) {
  std::vector<DeltaCase> taken;
  for (const DeltaCase& c : cases) {
    if (float16_holds(c)) taken.push_back(c);
  }
  return taken;
}

// Returns the cases of rules with two keys, and cases whose μ = κᵀk are between 1e-12 and 1e6.
inline std::vector<DeltaCase> two_key_cases_on_gpus() {
  std::vector<DeltaCase> cases = two_key_cases();
  for (const double norm : {1e-6, 1e-5, 1e-4, 1e-2, 1e-1, 1e1, 1e2, 1e3}) {
    for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
      DeltaCase c{"exact", 1, 1, false, 2, 70, 2, 64, 64, norm, Layout::contiguous, true, true, true};
      c.decay = decay;
      c.erase_key = EraseKey::gated;
      cases.push_back(c);
    }
  }
  return cases;
}

// Returns the cases with two keys that the chunkwise kernels of 16 bits take: two_key_cases_on_gpus, and of `family`
// the cases with the L2 norm and whole blocks of keys.
inline std::vector<DeltaCase> two_key_chunk_cases(const std::vector<DeltaCase>& family) {
  std::vector<DeltaCase> cases;
  for (const DeltaCase& c : two_key_cases_on_gpus()) {
    if (!gpu::divides_keys(c.shape())) cases.push_back(c);
  }
  for (DeltaCase c : family) {
    if (!c.qk_l2norm || c.key_dim % 16 != 0 || gpu::divides_keys(c.shape())) continue;
    c.erase_key = EraseKey::gated;
    cases.push_back(c);
  }
  return cases;
}

// The name of a test of a list of cases.
inline std::string indexed_name(const testing::TestParamInfo<DeltaCase>& info) {
  return std::to_string(info.index) + "_" + name_of(info.param);
}

// Captures call(stream) in a graph and replays it twice.
template <class Call>
void replay_in_graph(Call&& call) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  gpu::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  call(stream);
  gpu::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  gpu::check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  for (int i = 0; i < 2; ++i) gpu::check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
  gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  gpu::check(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
  gpu::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  gpu::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// Memory of the device.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) {
    if (bytes > 0) gpu::check(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

// A workspace whose bytes are all NaN, between two guard zones.
class PoisonedWorkspace {
 public:
  explicit PoisonedWorkspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + 2 * kGuard) { poison(); }

  gpu::Workspace get() const { return {static_cast<std::byte*>(memory_.data()) + kGuard, bytes_}; }
  void poison() const { gpu::check(cudaMemset(memory_.data(), 0xff, memory_.bytes()), "cudaMemset"); }
  bool guards_intact() const {
    std::vector<unsigned char> all(memory_.bytes());
    gpu::check(cudaMemcpy(all.data(), memory_.data(), all.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (all[i] != 0xff || all[all.size() - 1 - i] != 0xff) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 4096;
  std::size_t bytes_;
  DeviceBytes memory_;
};

// Returns a tensor of normally distributed numbers times a factor.
template <class T, int Rank, Layout kLayout = Layout::contiguous>
Tensor<T, Rank> random_tensor(const std::array<std::int64_t, Rank>& extent, Random& random, double factor = 1.0) {
  Tensor<T, Rank> tensor(extent, kLayout);
  tensor.assign(drawn(tensor.view().size(), [&] { return factor * random.normal(); }));
  return tensor;
}

// States at chunk boundaries in the memory of the device, poisoned.
class SavedStatesOnDevice {
 public:
  SavedStatesOnDevice(const DeltaShape& s, std::int64_t interval)
      : interval_(interval),
        extent_{s.batch, s.chunks(interval), s.value_heads, s.key_dim, s.value_dim},
        memory_(static_cast<std::size_t>(View<float, 5>::contiguous(nullptr, extent_).size()) * sizeof(float)) {
    gpu::check(cudaMemset(memory_.data(), 0xff, memory_.bytes()), "cudaMemset");
  }

  // Returns a forward or a backward with these states.
  template <class Problem>
  Problem in(Problem p) const {
    p.chunk_states = View<float, 5>::contiguous(static_cast<float*>(memory_.data()), extent_);
    p.saved = {interval_};
    return p;
  }

 private:
  std::int64_t interval_;
  std::array<std::int64_t, 5> extent_;
  DeviceBytes memory_;
};

// A copy of a host tensor's memory on the device, sentinels included. The first element of the view is aligned to 256
// bytes, so that contiguous rows take the kernels' paths for aligned rows.
template <class T, int Rank>
class DeviceTensor {
 public:
  explicit DeviceTensor(Tensor<T, Rank>& host)
      : host_(host), memory_(host.memory().empty() ? 0 : host.memory().size() * sizeof(T) + kAlignment) {
    upload();
  }

  // As the host tensor's view, in device memory.
  View<T, Rank> view() const {
    View<T, Rank> view = host_.view();
    if (view) view.data = data() + host_.first();
    return view;
  }
  void upload() const { copy(data(), host_.memory().data(), cudaMemcpyHostToDevice); }
  void download() const { copy(host_.memory().data(), data(), cudaMemcpyDeviceToHost); }

 private:
  static constexpr std::size_t kAlignment = 256;

  T* data() const {
    const std::size_t before = kAlignment - host_.first() * sizeof(T) % kAlignment;
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_.data()) + before);
  }
  void copy(void* to, const void* from, cudaMemcpyKind kind) const {
    const std::size_t bytes = host_.memory().size() * sizeof(T);
    if (bytes > 0) gpu::check(cudaMemcpy(to, from, bytes, kind), "cudaMemcpy");
  }

  Tensor<T, Rank>& host_;
  DeviceBytes memory_;
};

// A case's tensors on the device; its outputs come back with download().
template <class T>
class DeviceData {
 public:
  explicit DeviceData(DeltaData<T>& host)
      : host_(host),
        q_(host.q),
        k_(host.k),
        v_(host.v),
        o_(host.o),
        beta_(host.beta),
        g_(host.g),
        initial_state_(host.initial_state),
        final_state_(host.final_state),
        chunk_states_(host.chunk_states),
        dout_(host.dout),
        dq_(host.dq),
        dk_(host.dk),
        dv_(host.dv),
        erase_key_(host.erase_key),
        derase_key_(host.derase_key),
        dbeta_(host.dbeta),
        dg_(host.dg),
        dfinal_state_(host.dfinal_state),
        dinitial_state_(host.dinitial_state),
        cu_seqlens_(host.cu_seqlens.size() * sizeof(std::int64_t)) {
    if (cu_seqlens_.bytes() > 0) {
      gpu::check(cudaMemcpy(cu_seqlens_.data(), host.cu_seqlens.data(), cu_seqlens_.bytes(), cudaMemcpyHostToDevice),
                 "cudaMemcpy");
    }
  }

  DeltaForward<T> forward() const {
    DeltaForward<T> p = host_.forward();
    p.q = q_.view();
    p.k = k_.view();
    p.v = v_.view();
    p.beta = beta_.view();
    p.g = g_.view();
    p.initial_state = initial_state_.view();
    p.o = o_.view();
    p.final_state = final_state_.view();
    p.chunk_states = chunk_states_.view();
    p.erase_key = erase_key_.view();
    p.cu_seqlens.data = static_cast<const std::int64_t*>(cu_seqlens_.data());
    return p;
  }

  DeltaBackward<T> backward() const {
    DeltaBackward<T> p = backward_of(forward());
    p.dout = dout_.view();
    p.dfinal_state = dfinal_state_.view();
    p.dq = dq_.view();
    p.dk = dk_.view();
    p.dv = dv_.view();
    p.derase_key = derase_key_.view();
    p.dbeta = dbeta_.view();
    p.dg = dg_.view();
    p.dinitial_state = dinitial_state_.view();
    return p;
  }

  // Waits for the device and copies the outputs to the host.
  void download() const {
    gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (const auto* tensor : {&o_, &dq_, &dk_, &dv_, &derase_key_}) tensor->download();
    for (const auto* tensor : {&final_state_, &dg_, &dinitial_state_}) tensor->download();
    chunk_states_.download();
    dbeta_.download();
  }

 private:
  DeltaData<T>& host_;
  DeviceTensor<T, 4> q_, k_, v_, o_;
  DeviceTensor<T, 3> beta_;
  DeviceTensor<State<T>, 4> g_, initial_state_, final_state_;
  DeviceTensor<State<T>, 5> chunk_states_;
  DeviceTensor<T, 4> dout_, dq_, dk_, dv_, erase_key_, derase_key_;
  DeviceTensor<T, 3> dbeta_;
  DeviceTensor<State<T>, 4> dg_, dfinal_state_, dinitial_state_;
  DeviceBytes cu_seqlens_;
};

}  // namespace efla::test
