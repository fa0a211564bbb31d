#include "efla/ops/layers/swiglu.h"

#include <string>

#include "efla/ops/contiguous_columns.h"
#include "efla/ref/swiglu.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/swiglu.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

#ifdef EFLA_HAS_CUDA

template <class T>
std::string refuse_cuda(const SwigluForward<T>& p, bool) {
  return refuse_strided_columns(p.gate, p.up, p.y);
}

template <class T>
std::string refuse_cuda(const SwigluBackward<T>& p, bool) {
  return refuse_strided_columns(p.gate, p.up, p.dy, p.dgate, p.dup, p.y);
}

template <class Problem>
void run_cuda(const Problem& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::swiglu(p, stream); });
}

#endif

template <class Problem>
std::span<const Implementation<Problem>> swiglu_rows() {
  static const Implementation<Problem> rows[]{
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda, run_cuda)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::swiglu(p); }},
  };
  return rows;
}

}  // namespace

template <class T>
Choice swiglu_forward(const SwigluForward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("swiglu_forward", swiglu_rows<SwigluForward<T>>(), problem, options);
}

template <class T>
Choice swiglu_backward(const SwigluBackward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("swiglu_backward", swiglu_rows<SwigluBackward<T>>(), problem, options);
}

template Choice swiglu_forward(const SwigluForward<float>&, const RunOptions&);
template Choice swiglu_forward(const SwigluForward<bfloat16>&, const RunOptions&);
template Choice swiglu_backward(const SwigluBackward<float>&, const RunOptions&);
template Choice swiglu_backward(const SwigluBackward<bfloat16>&, const RunOptions&);

std::vector<ImplementationName> swiglu_implementations() { return names_of(swiglu_rows<SwigluForward<float>>()); }

}  // namespace efla
