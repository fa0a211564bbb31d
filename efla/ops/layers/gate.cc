#include "efla/ops/layers/gate.h"

#include <string>

#include "efla/cpu/gate.h"
#include "efla/ops/contiguous_columns.h"
#include "efla/ref/gate.h"

namespace efla {
namespace {

std::string refuse_strided_gate(const GateForward& p, bool) { return refuse_strided_columns(p.x, p.gate, p.y); }

std::span<const Implementation<GateForward>> gate_rows() {
  static const Implementation<GateForward> rows[]{
      {"simd", "simd", Device::Kind::cpu, refuse_strided_gate,
       [](const GateForward& p, const ExecutionContext& context) { cpu::gate(p, context.threads()); }},
      {"cuda", "cuda", Device::Kind::cuda, refuse_without_cuda<GateForward>, run_nothing<GateForward>},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<GateForward>,
       [](const GateForward& p, const ExecutionContext&) { ref::gate(p); }},
  };
  return rows;
}

}  // namespace

Choice gate_forward(const GateForward& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("gate_forward", gate_rows(), problem, options);
}

std::vector<ImplementationName> gate_implementations() { return names_of(gate_rows()); }

}  // namespace efla
