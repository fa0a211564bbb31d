#include "efla/torch/graph_replay.h"

#include <algorithm>
#include <map>
#include <mutex>

#ifdef EFLA_TORCH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ScopeExit.h>
#endif

namespace efla::libtorch {

using at::Tensor;

#ifdef EFLA_TORCH_CUDA
namespace {

constexpr std::size_t kMostShapes = 32;  // combinations of input shapes whose graphs are kept

// Makes this thread's stream for functions and captures the current stream while the object lives. Nothing else uses
// it, because a capture records everything that is launched on its stream, and other threads may have any stream of
// LibTorch's pool. Each thread has a stream of its own, because LibTorch gives the products of a stream one workspace,
// and graphs that several threads replay at once must not share it.
class FunctionStream {
 public:
  explicit FunctionStream(c10::DeviceIndex device) : guard_(c10::cuda::getStreamFromExternal(stream(device), device)) {}

 private:
  // Never destroyed, because LibTorch's memory remembers its stream.
  static cudaStream_t stream(c10::DeviceIndex device) {
    thread_local std::map<c10::DeviceIndex, cudaStream_t> streams;
    cudaStream_t& one = streams[device];
    const c10::cuda::CUDAGuard on(device);
    if (one == nullptr) C10_CUDA_CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    return one;
  }

  c10::cuda::CUDAStreamGuard guard_;
};

// One capture, or one end of a graph, at a time in the whole process, because LibTorch notes the graphs that exist in a
// set that it does not lock.
std::mutex& graphs_mutex() {
  static std::mutex one;
  return one;
}

}  // namespace

// Memory of LibTorch's allocator that the graphs of one object share, so that only one of them may run at a time.
struct GraphReplay::Pool {
  explicit Pool(c10::DeviceIndex index) : device(index), id(at::cuda::graph_pool_handle()) {}
  ~Pool() {
    for (; uses > 0; --uses) c10::cuda::CUDACachingAllocator::releasePool(device, id);
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Calls the function on this thread's stream for functions, with the pool's memory.
  Tensors run(const Function& function, const Tensors& inputs) {
    const c10::cuda::CUDAStream caller = c10::cuda::getCurrentCUDAStream(device);
    const FunctionStream guard(device);
    const c10::cuda::CUDAStream own = c10::cuda::getCurrentCUDAStream(device);
    at::cuda::CUDAEvent begin, end;
    begin.record(caller);
    begin.block(own);
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(
        device, id, [stream = own.stream()](cudaStream_t other) { return other == stream; });
    ++uses;
    const auto stop = c10::make_scope_exit([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(device, id); });
    const auto join = [&] {
      end.record(own);
      end.block(caller);
    };
    Tensors outputs;
    try {
      outputs = function(inputs);
    } catch (...) {
      join();  // because the first kernels may still use the inputs
      throw;
    }
    join();
    return outputs;
  }

  c10::DeviceIndex device;
  at::cuda::MempoolId_t id;
  int uses = 0;  // by run(), each of which the allocator counts
};

struct GraphReplay::Captured {
  Tensors inputs, outputs;
  std::unique_ptr<at::cuda::CUDAGraph> graph;

  Captured() = default;
  ~Captured() {
    const std::lock_guard lock(graphs_mutex());
    graph.reset();
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  bool fits(const Tensors& given) const {
    return std::equal(inputs.begin(), inputs.end(), given.begin(), given.end(),
                      [](const Tensor& a, const Tensor& b) { return a.sizes() == b.sizes(); });
  }

  // Captures a graph in the memory of a pool.
  void capture(const Function& function, const Pool& pool) {
    const std::lock_guard lock(graphs_mutex());
    const FunctionStream guard(pool.device);
    auto fresh = std::make_unique<at::cuda::CUDAGraph>();
    fresh->capture_begin(pool.id, cudaStreamCaptureModeThreadLocal);
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

GraphReplay::Tensors GraphReplay::call(const Function& function, const Tensors& inputs, const Tensors& held) {
  if (!inputs.front().is_cuda()) return function(inputs);
  const bool same = std::equal(held_.begin(), held_.end(), held.begin(), held.end(),
                               [](const Tensor& a, const Tensor& b) { return a.is_same(b); });
  if (!same) {
    captured_.clear();
    pool_.reset();  // because LibTorch takes no new captures into a pool all of whose graphs have ended
  }
  held_ = held;
  const auto known =
      std::find_if(captured_.begin(), captured_.end(), [&](const auto& captured) { return captured->fits(inputs); });
  if (known == captured_.end()) {
    auto fresh = std::make_unique<Captured>();
    for (const auto& input : inputs) fresh->inputs.push_back(input.clone());
    if (!pool_) pool_ = std::make_unique<Pool>(inputs.front().device().index());
    Tensors outputs = pool_->run(function, fresh->inputs);
    if (captured_.size() == kMostShapes) captured_.erase(captured_.begin());
    captured_.push_back(std::move(fresh));
    return outputs;
  }
  Captured& captured = **known;
  for (std::size_t i = 0; i < inputs.size(); ++i) captured.inputs[i].copy_(inputs[i]);
  if (!captured.graph) captured.capture(function, *pool_);
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

}  // namespace efla::libtorch
