// The delta rule on tensors, differentiable. delta_rule_ops.cc registers it as the ops efla::delta_rule,
// efla::delta_rule_step and efla::delta_rule_steps. docs/ops/delta_rule.md and docs/ops/delta_rule_step.md describe
// them.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

#include "efla/rule/problem.h"

namespace efla::autograd {

// B batch, T tokens, H query heads, HV value heads (a multiple of H), N sequences. q, k, v and beta have one type:
// float32 or bfloat16, on a GPU also float16, or float64, which only the implementation "ref" takes. Strides are
// arbitrary. g and states are float32, for float64 inputs float64. With n steps per token (rule/micro_steps.h) k, v,
// beta and erase_key have T·n rows, and cu_seqlens counts steps; on a GPU the steps are computed as tokens.
struct DeltaRuleInput {
  at::Tensor q, k;                // [B, T, H, K]
  at::Tensor v;                   // [B, T, HV, V]
  at::Tensor beta;                // [B, T, HV]
  at::Tensor initial_state = {};  // [N, HV, K, V]; undefined: zeros
  at::Tensor g = {};              // [B, T, HV] scalar or [B, T, HV, K] channel decay, its logarithm; undefined: none
  at::Tensor cu_seqlens = {};     // [N + 1] int64 with B = 1: 0, the ends of packed sequences; undefined: N = B
  at::Tensor erase_key = {};      // [B, T, H, K] κ, the dtype of q; undefined: k, a rule with one key
};

struct DeltaRuleOutput {
  at::Tensor o;            // [B, T, HV, V], the dtype of v
  at::Tensor final_state;  // [N, HV, K, V], float32 (float64 for float64 inputs), or no elements if not asked for
};

// Computes S̃_t = D_t S_{t−1}, S_t = S̃_t + k_t (b_t v_t − a_t S̃_tᵀ κ_t)ᵀ, o_t = scale · S_tᵀ q_t: equation 20 of the
// EFLA paper for the step size exact without decay and without erase_key. rule.decay and rule.two_keys follow from g
// and erase_key and need not be set. All inputs except cu_seqlens get gradients, from both outputs. implementation is
// as in RunOptions (ops/implementation.h). Throws Error that names the tensor.
DeltaRuleOutput delta_rule(const DeltaRuleInput& input, const DeltaRule& rule,
                           const std::string& implementation = "auto", bool output_final_state = true);

// Computes the same from a zero state, with q, k and v side by side in one tensor and their gradients side by side in
// one gradient. So a mixer's fused projection needs no copies. qkv [B, T, 2·H·K + HV·V]: the heads of q, then of k,
// then of v; HV is beta's. g and cu_seqlens as above, or undefined. Returns o.
at::Tensor delta_rule_packed(const at::Tensor& qkv, const at::Tensor& beta, const at::Tensor& g, std::int64_t heads,
                             std::int64_t key_dim, const DeltaRule& rule, const at::Tensor& cu_seqlens = {},
                             const std::string& implementation = "auto");

// Computes a decode step of one token. q, k [B, H, K], v [B, HV, V], beta [B, HV], g [B, HV], [B, HV, K] or undefined;
// state [B, HV, K, V], float32 or bfloat16, is updated in place. erase_key [B, H, K] or undefined: as in
// DeltaRuleInput. Returns o [B, HV, V]. Not differentiable.
at::Tensor delta_rule_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& beta,
                           const at::Tensor& g, at::Tensor& state, const DeltaRule& rule,
                           const std::string& implementation = "auto", const at::Tensor& erase_key = {});

// Computes decode steps of T tokens, 1 to kMaxStepTokens, from a pool of states. q, k [B, T, H, K], v [B, T, HV, V],
// beta [B, T, HV], g [B, T, HV], [B, T, HV, K] or undefined; states [P, HV, K, V], float32 or bfloat16, are updated in
// place. slots [B] int64 has the index of each batch entry's state, no two alike, or −1 for an entry without a state,
// whose outputs are zeros; undefined: entry b has state b. kept [B] int64 has the number of tokens, 0 to T, that each
// entry's state keeps; undefined: T. erase_key [B, T, H, K] or undefined. Returns o [B, T, HV, V]. Not differentiable.
at::Tensor delta_rule_steps(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& beta,
                            const at::Tensor& g, at::Tensor& states, const at::Tensor& slots, const at::Tensor& kept,
                            const DeltaRule& rule, const std::string& implementation = "auto",
                            const at::Tensor& erase_key = {});

}  // namespace efla::autograd
