#include "efla/autograd/graph_replay.h"

#include <algorithm>

#ifdef EFLA_TORCH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace efla::autograd {

using at::Tensor;

#ifdef EFLA_TORCH_CUDA
struct GraphReplay::Captured {
  Tensor input, output;
  std::vector<Tensor> held;  // kept alive, so that no other tensor can have their addresses
  std::unique_ptr<at::cuda::CUDAGraph> graph;

  bool fits(const Tensor& given, const std::vector<Tensor>& others) const {
    return input.sizes() == given.sizes() && std::equal(held.begin(), held.end(), others.begin(), others.end(),
                                                        [](const Tensor& a, const Tensor& b) { return a.is_same(b); });
  }

  void capture(const std::function<Tensor(const Tensor&)>& function) {
    // A capture needs a stream that is not the default one; nothing runs on it.
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, input.device().index()));
    auto fresh = std::make_unique<at::cuda::CUDAGraph>();
    fresh->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      output = function(input);
    } catch (...) {
      fresh->capture_end();
      throw;
    }
    fresh->capture_end();
    graph = std::move(fresh);
  }
};

Tensor GraphReplay::call(const std::function<Tensor(const Tensor&)>& function, const Tensor& input,
                         const std::vector<Tensor>& held) {
  if (!input.is_cuda()) return function(input);
  if (!captured_ || !captured_->fits(input, held)) {
    captured_ = std::make_unique<Captured>(Captured{input.clone(), {}, held, {}});
    return function(captured_->input);
  }
  captured_->input.copy_(input);
  if (!captured_->graph) captured_->capture(function);
  captured_->graph->replay();
  return captured_->output;
}
#else
struct GraphReplay::Captured {};

Tensor GraphReplay::call(const std::function<Tensor(const Tensor&)>& function, const Tensor& input,
                         const std::vector<Tensor>& /*held*/) {
  return function(input);
}
#endif

GraphReplay::GraphReplay() = default;
GraphReplay::~GraphReplay() = default;

}  // namespace efla::autograd
