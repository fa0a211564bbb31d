#include "efla/ops/layers/cross_entropy.h"

#include <string>

#include "efla/ops/contiguous_columns.h"
#include "efla/ref/cross_entropy.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/cross_entropy.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

#ifdef EFLA_HAS_CUDA

template <class T>
std::string refuse_cuda(const CrossEntropy<T>& p, bool) {
  return refuse_strided_columns(p.logits);
}

template <class T>
void run_cuda(const CrossEntropy<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::cross_entropy(p, stream); });
}

#endif

template <class T>
std::span<const Implementation<CrossEntropy<T>>> cross_entropy_rows() {
  using Problem = CrossEntropy<T>;
  static const Implementation<Problem> rows[]{
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda, run_cuda)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::cross_entropy(p); }},
  };
  return rows;
}

}  // namespace

template <class T>
Choice cross_entropy(const CrossEntropy<T>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("cross_entropy", cross_entropy_rows<T>(), problem, options);
}

template Choice cross_entropy(const CrossEntropy<float>&, const RunOptions&);
template Choice cross_entropy(const CrossEntropy<bfloat16>&, const RunOptions&);

}  // namespace efla
