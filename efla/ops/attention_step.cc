#include "efla/ops/attention_step.h"

#include <span>
#include <string>

#include "efla/ref/attention_step.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/attention/attention_step.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

#ifdef EFLA_HAS_CUDA

template <class S>
std::string refuse_cuda_attention_step(const AttentionStep<S>& p, bool) {
  return gpu::attention_step_refusal(p);
}

template <class S>
void run_cuda_attention_step(const AttentionStep<S>& p, const ExecutionContext& context) {
  call_on_gpu(context, gpu::attention_step_workspace_bytes(p),
              [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::attention_step(p, workspace, stream); });
}

template <class S>
std::string refuse_cuda_copy_pages(const PageCopy<S>&, bool) {
  return "";
}

template <class S>
void run_cuda_copy_pages(const PageCopy<S>& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::copy_pages(p, stream); });
}

#endif

template <class S>
std::span<const Implementation<AttentionStep<S>>> attention_step_rows() {
  using Problem = AttentionStep<S>;
  static const Implementation<Problem> rows[]{
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda_attention_step<S>, run_cuda_attention_step<S>)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::attention_step(p); }},
  };
  return rows;
}

template <class S>
std::span<const Implementation<PageCopy<S>>> copy_pages_rows() {
  using Problem = PageCopy<S>;
  static const Implementation<Problem> rows[]{
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda_copy_pages<S>, run_cuda_copy_pages<S>)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::copy_pages(p); }},
  };
  return rows;
}

}  // namespace

template <class S>
Choice attention_step(const AttentionStep<S>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("attention_step", attention_step_rows<S>(), problem, options);
}

template <class S>
Choice copy_pages(const PageCopy<S>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("copy_pages", copy_pages_rows<S>(), problem, options);
}

template Choice attention_step(const AttentionStep<float>&, const RunOptions&);
template Choice attention_step(const AttentionStep<bfloat16>&, const RunOptions&);
template Choice copy_pages(const PageCopy<float>&, const RunOptions&);
template Choice copy_pages(const PageCopy<bfloat16>&, const RunOptions&);

}  // namespace efla
