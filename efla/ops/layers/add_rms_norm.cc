#include "efla/ops/layers/add_rms_norm.h"

#include <string>

#include "efla/ops/contiguous_columns.h"
#include "efla/ref/add_rms_norm.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/add_rms_norm.h"
#include "efla/cuda/layers/rms_norm.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

#ifdef EFLA_HAS_CUDA

template <class... Views>
std::string refuse_rows(const View<const float, 2>& rows, const Views&... views) {
  if (rows.extent[1] > gpu::kMaxNormColumns) {
    return "it takes rows of at most " + std::to_string(gpu::kMaxNormColumns) + " columns";
  }
  return refuse_strided_columns(rows, views...);
}

template <class T>
std::string refuse_cuda(const AddRmsNormForward<T>& p, bool) {
  return refuse_rows(p.x, p.branch, p.weight, p.sum, p.y);
}

template <class T>
std::string refuse_cuda(const AddRmsNormBackward<T>& p, bool) {
  return refuse_rows(p.sum, p.weight, p.dy, p.dsum, p.dx, p.dbranch, p.dweight);
}

template <class T>
void run_cuda(const AddRmsNormForward<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::add_rms_norm(p, stream); });
}

template <class T>
void run_cuda(const AddRmsNormBackward<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, gpu::add_rms_norm_workspace_bytes(p),
              [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::add_rms_norm(p, workspace, stream); });
}

#endif

template <class Problem>
std::span<const Implementation<Problem>> add_rms_norm_rows() {
  static const Implementation<Problem> rows[]{
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda, run_cuda)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::add_rms_norm(p); }},
  };
  return rows;
}

}  // namespace

template <class T>
Choice add_rms_norm_forward(const AddRmsNormForward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("add_rms_norm_forward", add_rms_norm_rows<AddRmsNormForward<T>>(), problem, options);
}

template <class T>
Choice add_rms_norm_backward(const AddRmsNormBackward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("add_rms_norm_backward", add_rms_norm_rows<AddRmsNormBackward<T>>(), problem, options);
}

template Choice add_rms_norm_forward(const AddRmsNormForward<float>&, const RunOptions&);
template Choice add_rms_norm_forward(const AddRmsNormForward<bfloat16>&, const RunOptions&);
template Choice add_rms_norm_backward(const AddRmsNormBackward<float>&, const RunOptions&);
template Choice add_rms_norm_backward(const AddRmsNormBackward<bfloat16>&, const RunOptions&);

}  // namespace efla
