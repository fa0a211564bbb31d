// What the benchmarks on a GPU have in common: random inputs, memory on host and device, and times.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/dtype.h"
#include "efla/cuda/common/error.h"

namespace efla::bench::cuda {

using gpu::check;

// Returns random numbers in [−√3, √3], of variance 1. They are the same in every run and depend on `stream`.
template <class T = bfloat16>
std::vector<T> random_values(std::size_t count, std::uint64_t stream) {
  std::vector<T> values(count);
  std::uint64_t x = 0x9E3779B97F4A7C15U * (stream + 1);
  for (auto& value : values) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    value = from_state<T>((static_cast<float>(x >> 40) * 0x1p-23F - 1.0F) * 1.7320508F);
  }
  return values;
}

// A vector and its copy on the device.
template <class T>
struct Both {
  std::vector<T> host;
  T* device = nullptr;

  explicit Both(std::vector<T> values) : host(std::move(values)) {
    if (host.empty()) return;
    void* memory = nullptr;
    check(cudaMalloc(&memory, host.size() * sizeof(T)), "cudaMalloc");
    device = static_cast<T*>(memory);
    check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Both() { cudaFree(device); }
  Both(const Both&) = delete;
  Both& operator=(const Both&) = delete;
  // Fills the device's copy with NaN, so that outputs that are not written are found.
  void poison() { check(cudaMemset(device, 0xff, host.size() * sizeof(T)), "cudaMemset"); }
  // Copies the numbers of the device to the host.
  void download() {
    check(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
};

// The median, the least and the ninth decile of the times of calls, in milliseconds.
struct Times {
  double median, least, p90;
};

// Times `repeats` launches on a stream. The L2 cache is overwritten before each.
template <class Launch>
Times time_launches(cudaStream_t stream, int repeats, Launch&& launch) {
  cudaEvent_t begin = nullptr, end = nullptr;
  void* flush = nullptr;
  constexpr std::size_t kFlush = std::size_t{256} << 20;
  check(cudaMalloc(&flush, kFlush), "cudaMalloc");
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> times;
  for (int i = -3; i < repeats; ++i) {
    check(cudaMemsetAsync(flush, i & 1, kFlush, stream), "cudaMemsetAsync");
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    launch();
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (i >= 0) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  check(cudaFree(flush), "cudaFree");
  return {times[times.size() / 2], times.front(), times[times.size() * 9 / 10]};
}

// Times of replays of a captured call, and of calls that launch their kernels one by one.
struct CallTimes {
  Times replay, eager;
};

// Times call(stream) in both ways.
template <class Call>
CallTimes time_calls(int repeats, Call&& call) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  call(stream);
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  const CallTimes times{
      time_launches(stream, repeats, [&] { check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch"); }),
      time_launches(stream, repeats, [&] { call(stream); })};
  check(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return times;
}

}  // namespace efla::bench::cuda
