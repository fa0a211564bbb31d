#include "efla/ops/layers_step.h"

#include <cstring>
#include <vector>

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/linear.h"
#include "efla/cuda/recurrent/layers_step.h"
#include "efla/cuda/recurrent/mixer_step.h"
#include "efla/ops/cuda_call.h"
#include "efla/ops/gpu.h"
#endif

namespace efla {

#ifdef EFLA_HAS_CUDA
struct LayersStep::List {
  Device device;
  gpu::LayersStep step;
  GpuMemory memory;  // the operators, and the kernel's counters behind them

  std::size_t op_bytes() const { return step.ops().size() * sizeof(gpu::StepOp); }

  // kernel_refusal: of the operator alone.
  template <class Problem>
  bool add(const Problem& problem, std::string (*kernel_refusal)(const Problem&)) {
    if (device.is_cpu()) return false;
    const gpu::OnDevice current(device.index);
    if (!kernel_refusal(problem).empty() || !gpu::LayersStep::refusal(problem).empty()) return false;
    step.add(problem);
    return true;
  }
};

LayersStep::LayersStep(const ExecutionContext& context) : list_(new List{context.device, {}, {}}) {}

bool LayersStep::add(const LinearForward& problem) {
  validate(problem);
  return list_->add(problem, gpu::linear_refusal);
}

bool LayersStep::add(const MixerStep& problem) {
  validate(problem, list_->device);
  return list_->add(problem, gpu::mixer_step_refusal);
}

void LayersStep::finish() {
  std::vector<std::byte> bytes(list_->op_bytes() + gpu::LayersStep::kCounterBytes);
  std::memcpy(bytes.data(), list_->step.ops().data(), list_->op_bytes());
  list_->memory = GpuMemory(list_->device, bytes.size());
  list_->memory.write(bytes.data());
}

void LayersStep::run(const ExecutionContext& context) const {
  const auto* ops = static_cast<const gpu::StepOp*>(list_->memory.data());
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) {
    list_->step.run(ops, reinterpret_cast<unsigned*>(static_cast<std::byte*>(list_->memory.data()) + list_->op_bytes()),
                    stream);
  });
}
#else
struct LayersStep::List {};

LayersStep::LayersStep(const ExecutionContext& /*context*/) {}
bool LayersStep::add(const LinearForward& /*problem*/) { return false; }
bool LayersStep::add(const MixerStep& /*problem*/) { return false; }
void LayersStep::finish() {}
void LayersStep::run(const ExecutionContext& /*context*/) const {}
#endif

LayersStep::~LayersStep() = default;

}  // namespace efla
