#include "efla/ops/layers/linear.h"

#include <span>
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

// The type of problem of this list: all problems of one call.
using Problems = std::span<const LinearForward>;

std::string refuse_simd_linear(const Problems& problems, bool) {
  for (const auto& p : problems) {
    if (p.is_fused()) return "it computes the product alone";
    auto reason = refuse_strided_columns(p.x, p.weight, p.narrow_weight, p.byte_weight, p.scales, p.y);
    if (!reason.empty()) return reason;
  }
  return "";
}

#ifdef EFLA_HAS_CUDA

std::string refuse_cuda_linear(const Problems& problems, bool) {
  for (const auto& p : problems) {
    if (auto reason = gpu::linear_refusal(p); !reason.empty()) return reason;
  }
  return "";
}

void run_cuda_linear(const Problems& problems, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) {
    for (const auto& p : problems) gpu::linear(p, stream);
  });
}

#endif

std::span<const Implementation<Problems>> linear_rows() {
  using Problem = Problems;
  static const Implementation<Problem> rows[]{
      {"simd", "simd", Device::Kind::cpu, refuse_simd_linear,
       [](const Problems& problems, const ExecutionContext& context) { cpu::linear(problems, context.threads()); }},
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda_linear, run_cuda_linear)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problems>,
       [](const Problems& problems, const ExecutionContext&) {
         for (const auto& p : problems) ref::linear(p);
       }},
  };
  return rows;
}

}  // namespace

Choice linear_forward(std::span<const LinearForward> problems, const RunOptions& options) {
  for (const auto& problem : problems) validate(problem);
  return choose_and_run("linear_forward", linear_rows(), problems, options);
}

Choice linear_forward(const LinearForward& problem, const RunOptions& options) {
  return linear_forward(Problems(&problem, 1), options);
}

bool takes_linear_forward(const LinearForward& problem, const RunOptions& options) {
  validate(problem);
  return takes(linear_rows(), Problems(&problem, 1), options);
}

}  // namespace efla
