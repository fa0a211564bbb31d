#include "efla/ops/layers/glu.h"

#include <string>

#include "efla/cpu/glu.h"
#include "efla/ops/contiguous_columns.h"
#include "efla/ref/glu.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/glu.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

#ifdef EFLA_HAS_CUDA

template <class T>
std::string refuse_cuda(const GluForward<T>& p, bool) {
  return refuse_strided_columns(p.gate, p.up, p.y);
}

template <class T>
std::string refuse_cuda(const GluBackward<T>& p, bool) {
  return refuse_strided_columns(p.gate, p.up, p.dy, p.dgate, p.dup, p.y);
}

template <class Problem>
void run_cuda(const Problem& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::glu(p, stream); });
}

#endif

std::string refuse_simd(const GluForward<float>& p, bool) { return refuse_strided_columns(p.gate, p.up, p.y); }

template <class Problem>
Implementation<Problem> cuda_row() {
  return {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda, run_cuda)};
}

template <class Problem>
Implementation<Problem> ref_row() {
  return {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
          [](const Problem& p, const ExecutionContext&) { ref::glu(p); }};
}

template <class Problem>
std::span<const Implementation<Problem>> glu_rows() {
  static const Implementation<Problem> rows[]{cuda_row<Problem>(), ref_row<Problem>()};
  return rows;
}

template <>
std::span<const Implementation<GluForward<float>>> glu_rows() {
  using Problem = GluForward<float>;
  static const Implementation<Problem> rows[]{
      {"simd", "simd", Device::Kind::cpu, refuse_simd,
       [](const Problem& p, const ExecutionContext& context) { cpu::glu(p, context.threads()); }},
      cuda_row<Problem>(),
      ref_row<Problem>()};
  return rows;
}

}  // namespace

template <class T>
Choice glu_forward(const GluForward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("glu_forward", glu_rows<GluForward<T>>(), problem, options);
}

template <class T>
Choice glu_backward(const GluBackward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("glu_backward", glu_rows<GluBackward<T>>(), problem, options);
}

template Choice glu_forward(const GluForward<float>&, const RunOptions&);
template Choice glu_forward(const GluForward<bfloat16>&, const RunOptions&);
template Choice glu_backward(const GluBackward<float>&, const RunOptions&);
template Choice glu_backward(const GluBackward<bfloat16>&, const RunOptions&);

}  // namespace efla
