#include "efla/ops/layers/decay_gate.h"

#include <string>

#include "efla/ops/contiguous_columns.h"
#include "efla/ref/decay_gate.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/decay_gate.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

#ifdef EFLA_HAS_CUDA

template <class T>
std::string refuse_cuda_gate(const DecayGateForward<T>& p, bool) {
  return refuse_strided_columns(p.z, p.g);
}

template <class T>
std::string refuse_cuda_gate(const DecayGateBackward<T>& p, bool) {
  return refuse_strided_columns(p.z, p.dg, p.dz);
}

template <class T>
void run_cuda_gate(const DecayGateForward<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::decay_gate(p, stream); });
}

template <class T>
void run_cuda_gate(const DecayGateBackward<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, gpu::decay_gate_workspace_bytes(p),
              [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::decay_gate(p, workspace, stream); });
}

#endif

template <class Problem>
std::span<const Implementation<Problem>> decay_gate_rows() {
  static const Implementation<Problem> rows[]{
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_cuda_gate, run_cuda_gate)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::decay_gate(p); }},
  };
  return rows;
}

}  // namespace

template <class T>
Choice decay_gate_forward(const DecayGateForward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("decay_gate_forward", decay_gate_rows<DecayGateForward<T>>(), problem, options);
}

template <class T>
Choice decay_gate_backward(const DecayGateBackward<T>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("decay_gate_backward", decay_gate_rows<DecayGateBackward<T>>(), problem, options);
}

template Choice decay_gate_forward(const DecayGateForward<float>&, const RunOptions&);
template Choice decay_gate_forward(const DecayGateForward<bfloat16>&, const RunOptions&);
template Choice decay_gate_backward(const DecayGateBackward<float>&, const RunOptions&);
template Choice decay_gate_backward(const DecayGateBackward<bfloat16>&, const RunOptions&);

}  // namespace efla
