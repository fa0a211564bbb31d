#include "efla/ops/layers_step.h"

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
  GpuMemory memory;  // of the kernel

  // kernel_refusal: of the operator alone.
  template <class Problem>
  bool add(const Problem& problem, std::string (*kernel_refusal)(const Problem&)) {
    if (device.is_cpu()) return false;
    const gpu::OnDevice current(device.index);
    if (!kernel_refusal(problem).empty() || !gpu::LayersStep::takes(problem)) return false;
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
  list_->memory = GpuMemory(list_->device, list_->step.bytes());
  list_->memory.write(list_->step.image(list_->memory.data()).data());
}

void LayersStep::run(const ExecutionContext& context) const {
  call_on_gpu(context, 0,
              [&](const gpu::Workspace&, cudaStream_t stream) { list_->step.run(list_->memory.data(), stream); });
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
