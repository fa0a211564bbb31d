#include "efla/autograd/graph_replay.h"

#include <algorithm>
#include <map>
#include <mutex>

#ifdef EFLA_TORCH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace efla::autograd {

using at::Tensor;

#ifdef EFLA_TORCH_CUDA
namespace {

constexpr std::size_t kMostShapes = 32;  // combinations of input shapes whose graphs are kept

// One capture at a time, on a stream that nothing else uses: a capture records everything that is launched on its
// stream, and other threads may have any stream of LibTorch's pool. Each thread has a stream of its own, because
// LibTorch gives the products of a stream one workspace, and graphs that several threads replay at once must not share
// it.
class CaptureStream {
 public:
  explicit CaptureStream(c10::DeviceIndex device)
      : lock_(mutex()), guard_(c10::cuda::getStreamFromExternal(stream(device), device)) {}

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  // Never destroyed, because LibTorch's memory remembers its stream.
  static cudaStream_t stream(c10::DeviceIndex device) {
    thread_local std::map<c10::DeviceIndex, cudaStream_t> streams;
    cudaStream_t& one = streams[device];
    const c10::cuda::CUDAGuard on(device);
    if (one == nullptr) C10_CUDA_CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    return one;
  }

  std::lock_guard<std::mutex> lock_;
  c10::cuda::CUDAStreamGuard guard_;
};

}  // namespace

struct GraphReplay::Captured {
  Tensors inputs, outputs;
  std::unique_ptr<at::cuda::CUDAGraph> graph;

  bool fits(const Tensors& given) const {
    return std::equal(inputs.begin(), inputs.end(), given.begin(), given.end(),
                      [](const Tensor& a, const Tensor& b) { return a.sizes() == b.sizes(); });
  }

  // Captures a graph in the memory of a pool. Graphs of one pool share this memory, so that only one of them may run at
  // a time.
  void capture(const Function& function, at::cuda::MempoolId_t pool) {
    const CaptureStream stream(inputs.front().device().index());
    auto fresh = std::make_unique<at::cuda::CUDAGraph>();
    fresh->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    try {
      outputs = function(inputs);
    } catch (...) {
      try {
        fresh->capture_end();
      } catch (const std::exception&) {  // says only that the capture failed
      }
      throw;
    }
    fresh->capture_end();
    graph = std::move(fresh);
  }
};

struct GraphReplay::Pool {
  at::cuda::MempoolId_t id;
};

GraphReplay::Tensors GraphReplay::call(const Function& function, const Tensors& inputs, const Tensors& held) {
  if (!inputs.front().is_cuda()) return function(inputs);
  const bool same = std::equal(held_.begin(), held_.end(), held.begin(), held.end(),
                               [](const Tensor& a, const Tensor& b) { return a.is_same(b); });
  if (!same) captured_.clear();
  held_ = held;
  const auto known =
      std::find_if(captured_.begin(), captured_.end(), [&](const auto& captured) { return captured->fits(inputs); });
  if (known == captured_.end()) {
    auto fresh = std::make_unique<Captured>();
    for (const auto& input : inputs) fresh->inputs.push_back(input.clone());
    Tensors outputs = function(fresh->inputs);
    if (captured_.size() == kMostShapes) captured_.erase(captured_.begin());
    captured_.push_back(std::move(fresh));
    return outputs;
  }
  Captured& captured = **known;
  for (std::size_t i = 0; i < inputs.size(); ++i) captured.inputs[i].copy_(inputs[i]);
  if (!captured.graph) {
    if (!pool_) pool_ = std::make_unique<Pool>(Pool{at::cuda::graph_pool_handle()});
    captured.capture(function, pool_->id);
  }
  captured.graph->replay();
  return captured.outputs;
}
#else
struct GraphReplay::Captured {};
struct GraphReplay::Pool {};

GraphReplay::Tensors GraphReplay::call(const Function& function, const Tensors& inputs, const Tensors& /*held*/) {
  return function(inputs);
}
#endif

GraphReplay::GraphReplay() = default;
GraphReplay::~GraphReplay() = default;

}  // namespace efla::autograd
