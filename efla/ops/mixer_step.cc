#include "efla/ops/mixer_step.h"

#include <span>
#include <string>

#include "efla/ref/mixer_step.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/recurrent/mixer_step.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

#ifdef EFLA_HAS_CUDA

std::string refuse_cuda_mixer_step(const MixerStep& p, bool) { return gpu::mixer_step_refusal(p); }

void run_cuda_mixer_step(const MixerStep& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::mixer_step(p, stream); });
}

#endif

std::span<const Implementation<MixerStep>> mixer_step_rows() {
  using Problem = MixerStep;
  static const Implementation<Problem> rows[]{
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda_mixer_step, run_cuda_mixer_step)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::mixer_step(p); }},
  };
  return rows;
}

}  // namespace

Choice mixer_step(const MixerStep& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("mixer_step", mixer_step_rows(), problem, options);
}

bool takes_mixer_step(const MixerStep& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return takes(mixer_step_rows(), problem, options);
}

}  // namespace efla
