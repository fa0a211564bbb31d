#include "efla/ops/layers/linear.h"

#include <string>

#include "efla/cpu/linear.h"
#include "efla/ops/contiguous_columns.h"
#include "efla/ref/linear.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/linear.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

std::string refuse_simd_linear(const LinearForward& p, bool) {
  if (p.is_fused()) return "it computes the product alone";
  return refuse_strided_columns(p.x, p.weight, p.narrow_weight, p.byte_weight, p.scales, p.y);
}

#ifdef EFLA_HAS_CUDA

std::string refuse_cuda_linear(const LinearForward& p, bool) { return gpu::linear_refusal(p); }

void run_cuda_linear(const LinearForward& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::linear(p, stream); });
}

#endif

std::span<const Implementation<LinearForward>> linear_rows() {
  using Problem = LinearForward;
  static const Implementation<Problem> rows[]{
      {"simd", "simd", Device::Kind::cpu, refuse_simd_linear,
       [](const LinearForward& p, const ExecutionContext& context) { cpu::linear(p, context.threads()); }},
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda_linear, run_cuda_linear)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<LinearForward>,
       [](const LinearForward& p, const ExecutionContext&) { ref::linear(p); }},
  };
  return rows;
}

}  // namespace

Choice linear_forward(const LinearForward& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("linear_forward", linear_rows(), problem, options);
}

bool takes_linear_forward(const LinearForward& problem, const RunOptions& options) {
  validate(problem);
  return takes(linear_rows(), problem, options);
}

}  // namespace efla
