#include "efla/ops/layers/rope.h"

#include <span>
#include <string>

#include "efla/cpu/rope.h"
#include "efla/ref/rope.h"

namespace efla {
namespace {

std::span<const Implementation<RopeForward>> rope_rows() {
  using Problem = RopeForward;
  static const Implementation<Problem> rows[]{
      {"cpu", "cpu", Device::Kind::cpu, [](const Problem&, bool) { return std::string(); },
       [](const Problem& p, const ExecutionContext& context) { cpu::rope(p, context.threads()); }},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::rope(p); }},
  };
  return rows;
}

}  // namespace

Choice rope_forward(const RopeForward& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("rope_forward", rope_rows(), problem, options);
}

}  // namespace efla
