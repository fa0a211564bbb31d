#include "efla/ops/layers/rms_norm.h"

#include <string>

#include "efla/cpu/rms_norm.h"
#include "efla/ops/contiguous_columns.h"
#include "efla/ops/scratch.h"
#include "efla/ref/rms_norm.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/rms_norm.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

template <class T>
std::string refuse_strided_norm(const RmsNormForward<T>& p, bool) {
  return refuse_strided_columns(p.x, p.weight, p.y, p.gate);
}

template <class T>
std::string refuse_strided_norm(const RmsNormBackward<T>& p, bool) {
  return refuse_strided_columns(p.x, p.weight, p.dy, p.dx, p.dweight, p.gate, p.dgate);
}

template <class T>
void run_simd_norm(const RmsNormForward<T>& p, const ExecutionContext& context) {
  cpu::rms_norm(p, context.threads());
}

template <class T>
void run_simd_norm(const RmsNormBackward<T>& p, const ExecutionContext& context) {
  const Scratch scratch(p.dweight ? cpu::rms_norm_workspace_bytes(p.x.extent[0], p.x.extent[1]) : 0);
  cpu::rms_norm(p, scratch.workspace(), context.threads());
}

#ifdef EFLA_HAS_CUDA

template <class Problem>
std::string refuse_cuda_norm(const Problem& p, bool named) {
  if (p.x.extent[1] > gpu::kMaxNormColumns) {
    return "it takes rows of at most " + std::to_string(gpu::kMaxNormColumns) + " columns";
  }
  return refuse_strided_norm(p, named);
}

template <class T>
void run_cuda_norm(const RmsNormForward<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::rms_norm(p, stream); });
}

template <class T>
void run_cuda_norm(const RmsNormBackward<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, gpu::rms_norm_workspace_bytes(p),
              [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::rms_norm(p, workspace, stream); });
}

#endif

template <class Problem>
std::span<const Implementation<Problem>> rms_norm_rows() {
  static const Implementation<Problem> rows[]{
      {"simd", "simd", Device::Kind::cpu, refuse_strided_norm, run_simd_norm},
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda_norm<Problem>, run_cuda_norm)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::rms_norm(p); }},
  };
  return rows;
}

}  // namespace

template <class T>
Choice rms_norm_forward(const RmsNormForward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("rms_norm_forward", rms_norm_rows<RmsNormForward<T>>(), problem, options);
}

template <class T>
Choice rms_norm_backward(const RmsNormBackward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("rms_norm_backward", rms_norm_rows<RmsNormBackward<T>>(), problem, options);
}

template Choice rms_norm_forward(const RmsNormForward<float>&, const RunOptions&);
template Choice rms_norm_forward(const RmsNormForward<bfloat16>&, const RunOptions&);
template Choice rms_norm_backward(const RmsNormBackward<float>&, const RunOptions&);
template Choice rms_norm_backward(const RmsNormBackward<bfloat16>&, const RunOptions&);

std::vector<ImplementationName> rms_norm_implementations() { return names_of(rms_norm_rows<RmsNormForward<float>>()); }

}  // namespace efla
