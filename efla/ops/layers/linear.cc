#include "efla/ops/layers/linear.h"

#include <string>

#include "efla/cpu/linear.h"
#include "efla/ops/contiguous_columns.h"
#include "efla/ref/linear.h"

namespace efla {
namespace {

std::string refuse_strided_linear(const LinearForward& p, bool) {
  return refuse_strided_columns(p.x, p.weight, p.narrow_weight, p.byte_weight, p.scales, p.y);
}

std::span<const Implementation<LinearForward>> linear_rows() {
  static const Implementation<LinearForward> rows[]{
      {"simd", "simd", Device::Kind::cpu, refuse_strided_linear,
       [](const LinearForward& p, const ExecutionContext& context) { cpu::linear(p, context.threads()); }},
      {"cuda", "cuda", Device::Kind::cuda, refuse_without_cuda<LinearForward>, run_nothing<LinearForward>},
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

std::vector<ImplementationName> linear_implementations() { return names_of(linear_rows()); }

}  // namespace efla
