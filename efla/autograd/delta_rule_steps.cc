// Decode steps on tensors: one token per batch entry, or several over a pool of states.
#include <ATen/MemoryOverlap.h>
#include <ATen/record_function.h>

#include <string>
#include <type_traits>
#include <utility>

#include "efla/autograd/delta_rule.h"
#include "efla/autograd/delta_rule_call.h"
#include "efla/autograd/delta_rule_problem.h"
#include "efla/autograd/tensor_view.h"
#include "efla/ops/delta.h"
#include "efla/torch/context.h"

namespace efla::autograd {
namespace {

using at::Tensor;

// Runs delta_step if kTokenAxes is 0 and delta_steps if it is 1. kTokenAxes is the number of axes T of the tensors.
template <int kTokenAxes>
Tensor run_steps(const char* name, const DeltaRuleInput& in, Tensor& states, const Tensor& slots, const Tensor& kept,
                 const DeltaRule& given_rule, const std::string& implementation) {
  constexpr bool kTokens = kTokenAxes == 1;
  constexpr int kRank = 3 + kTokenAxes;
  const Tensor& q = in.q;
  if (!q.defined())
    throw Error(name, "q", "an undefined tensor", kTokens ? "a tensor [B, T, H, K]" : "a tensor [B, H, K]");
  const auto dtype = q.scalar_type();
  const auto state_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto check_one = [&](const char* argument, const Tensor& tensor, at::ScalarType type, std::int64_t rank,
                             const char* axes) { check_tensor(name, argument, tensor, type, rank, axes, q.device()); };
  check_one("q", q, dtype, kRank, kTokens ? "[B, T, H, K]" : "[B, H, K]");
  check_one("k", in.k, dtype, kRank, kTokens ? "[B, T, H, K]" : "[B, H, K]");
  if (in.erase_key.defined()) {
    check_one("erase_key", in.erase_key, dtype, kRank, kTokens ? "[B, T, H, K]" : "[B, H, K]");
  }
  check_one("v", in.v, dtype, kRank, kTokens ? "[B, T, HV, V]" : "[B, HV, V]");
  check_one("beta", in.beta, dtype, kRank - 1, kTokens ? "[B, T, HV]" : "[B, HV]");
  if (in.g.defined()) {
    check_one("g", in.g, state_dtype, in.g.dim() == kRank - 1 ? kRank - 1 : kRank,
              kTokens ? "[B, T, HV] or [B, T, HV, K]" : "[B, HV] or [B, HV, K]");
  }
  const bool narrow = states.defined() && states.scalar_type() == at::kBFloat16;
  check_one(kTokens ? "states" : "state", states, narrow ? at::kBFloat16 : state_dtype, 4,
            kTokens ? "[P, HV, K, V]" : "[B, HV, K, V]");
  if (at::has_internal_overlap(states) == at::MemOverlap::Yes) {
    throw Error(name, kTokens ? "states" : "state", "a tensor whose elements share memory, as expand() makes it",
                "one that can be written, as clone() makes it");
  }
  for (const auto& [argument, tensor] : {std::pair("slots", &slots), std::pair("kept", &kept)}) {
    if (!tensor->defined()) continue;
    check_one(argument, *tensor, at::kLong, 1, "[B]");
    if (tensor->numel() == 0) check_shape(name, argument, *tensor, {q.size(0)});  // its view would count as none
  }
  const at::NoGradGuard no_grad;
  const std::int64_t n = kTokens ? steps_per_token(in) : 1;
  Tensor o = kTokens ? empty_output(in) : at::empty(in.v.sizes(), in.v.options());
  with_element_type(name, q, [&]<class T>(T) {
    const auto run = [&]<class S>(S) {
      std::conditional_t<kTokens, DeltaSteps<T, S>, DeltaStep<T, S>> problem;
      problem.shape = {q.size(0), kTokens ? q.size(1) * n : 1, q.size(-2), in.v.size(-2), q.size(-1), in.v.size(-1)};
      problem.rule = given_rule;
      problem.rule.decay = decay_of(in.g, kRank - 1);
      problem.rule.two_keys = in.erase_key.defined();
      problem.erase_key = view_of<const T, kRank>(in.erase_key);
      problem.q = view_of<const T, kRank>(q);
      problem.k = view_of<const T, kRank>(in.k);
      problem.v = view_of<const T, kRank>(in.v);
      problem.beta = view_of<const T, kRank - 1>(in.beta);
      problem.g = view_of_gate<const State<T>, kRank>(in.g);
      problem.slots = view_of<const std::int64_t, 1>(slots);
      problem.o = view_of<T, kRank>(o);
      if constexpr (kTokens) {
        problem.states = view_of<S, 4>(states);
        problem.kept = view_of<const std::int64_t, 1>(kept);
        delta_steps(problem, {implementation, libtorch::context_of(q)});
      } else {
        problem.state = view_of<S, 4>(states);
        delta_step(problem, {implementation, libtorch::context_of(q)});
      }
    };
    if constexpr (std::is_same_v<T, double>) {
      if (narrow) throw Error(name, kTokens ? "states" : "state", "dtype BFloat16", "Double, as q");
      run(State<T>{});
    } else if (narrow) {
      run(bfloat16{});
    } else {
      run(State<T>{});
    }
  });
  // So that autograd refuses a backward that needs the states from before the call.
  if (!states.is_inference()) states.unsafeGetTensorImpl()->bump_version();
  return o;
}

}  // namespace

Tensor delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& g,
                       Tensor& state, const DeltaRule& rule, const std::string& implementation,
                       const Tensor& erase_key) {
  RECORD_USER_SCOPE("efla::delta_rule_step");
  return run_steps<0>(kDeltaRuleStep, {q, k, v, beta, {}, g, {}, erase_key}, state, {}, {}, rule, implementation);
}

Tensor delta_rule_steps(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& g,
                        Tensor& states, const Tensor& slots, const Tensor& kept, const DeltaRule& rule,
                        const std::string& implementation, const Tensor& erase_key) {
  RECORD_USER_SCOPE("efla::delta_rule_steps");
  return run_steps<1>(kDeltaRuleSteps, {q, k, v, beta, {}, g, {}, erase_key}, states, slots, kept, rule,
                      implementation);
}

}  // namespace efla::autograd
