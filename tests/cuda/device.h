// The tensors of a case on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "efla/cuda/delta.h"
#include "efla/cuda/error.h"
#include "efla/rule/problem.h"
#include "tests/support/delta_case.h"
#include "tests/support/tensor.h"

namespace efla::test {

// Returns why no kernel can run here, or "" where one can.
inline std::string why_no_gpu() {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess) return cudaGetErrorString(code);
  return devices > 0 ? "" : "no device";
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

// A copy of a host tensor's memory on the device, sentinels included.
template <class T, int Rank>
class DeviceTensor {
 public:
  explicit DeviceTensor(Tensor<T, Rank>& host) : host_(host), memory_(host.memory().size() * sizeof(T)) { upload(); }

  // As the host tensor's view, in device memory.
  View<T, Rank> view() const {
    View<T, Rank> view = host_.view();
    if (view) view.data = static_cast<T*>(memory_.data()) + host_.first();
    return view;
  }
  void upload() const { copy(memory_.data(), host_.memory().data(), cudaMemcpyHostToDevice); }
  void download() const { copy(host_.memory().data(), memory_.data(), cudaMemcpyDeviceToHost); }

 private:
  void copy(void* to, const void* from, cudaMemcpyKind kind) const {
    if (memory_.bytes() > 0) gpu::check(cudaMemcpy(to, from, memory_.bytes(), kind), "cudaMemcpy");
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
    p.cu_seqlens.data = static_cast<const std::int64_t*>(cu_seqlens_.data());
    return p;
  }

  // Copies the host's outputs, poisoned by the caller, to the device.
  void upload_outputs() const {
    o_.upload();
    final_state_.upload();
    chunk_states_.upload();
  }

  // Waits for the device and copies the outputs to the host.
  void download() const {
    gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    o_.download();
    final_state_.download();
    chunk_states_.download();
  }

 private:
  DeltaData<T>& host_;
  DeviceTensor<T, 4> q_, k_, v_, o_;
  DeviceTensor<T, 3> beta_;
  DeviceTensor<State<T>, 4> g_, initial_state_, final_state_;
  DeviceTensor<State<T>, 5> chunk_states_;
  DeviceBytes cu_seqlens_;
};

}  // namespace efla::test
