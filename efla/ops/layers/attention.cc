#include "efla/ops/layers/attention.h"

#include <span>
#include <string>

#include "efla/cpu/attention/attention.h"
#include "efla/ops/scratch.h"
#include "efla/ref/attention.h"

namespace efla {
namespace {

template <class S>
void run_simd(const AttentionForward<S>& p, const ExecutionContext& context) {
  ThreadPool& pool = context.threads();
  const cpu::AttentionPlan plan = cpu::plan_attention(p, pool.threads());
  const Scratch scratch(cpu::attention_workspace_bytes(p.shape, plan, pool.threads()));
  cpu::attention(p, plan, scratch.workspace(), pool);
}

template <class S>
std::span<const Implementation<AttentionForward<S>>> attention_rows() {
  using Problem = AttentionForward<S>;
  static const Implementation<Problem> rows[]{
      {"simd", "simd", Device::Kind::cpu, [](const Problem&, bool) { return std::string(); }, run_simd<S>},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::attention(p); }},
  };
  return rows;
}

}  // namespace

template <class S>
Choice attention_forward(const AttentionForward<S>& problem, const RunOptions& options) {
  validate(problem);
  return choose_and_run("attention_forward", attention_rows<S>(), problem, options);
}

template Choice attention_forward(const AttentionForward<float>&, const RunOptions&);
template Choice attention_forward(const AttentionForward<bfloat16>&, const RunOptions&);

}  // namespace efla
