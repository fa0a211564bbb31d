// The delta rule on tensors, differentiable. Registered as the ops efla::delta_rule, efla::delta_rule_step and
// efla::delta_rule_steps too (delta_rule_ops.cc).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

#include "efla/rule/problem.h"

namespace efla::autograd {

// B batch, T tokens, H query heads, HV value heads (a multiple of H), N sequences. q, k, v and beta are float32 or
// bfloat16, on a GPU also float16 (or float64, which the implementation "ref" alone takes), all alike, with any
// strides; g and states are float32 (float64 for float64 inputs).
struct DeltaRuleInput {
  at::Tensor q, k;                // [B, T, H, K]
  at::Tensor v;                   // [B, T, HV, V]
  at::Tensor beta;                // [B, T, HV]
  at::Tensor initial_state = {};  // [N, HV, K, V]; undefined: zeros
  at::Tensor g = {};              // [B, T, HV] scalar or [B, T, HV, K] channel decay, its logarithm; undefined: none
  at::Tensor cu_seqlens = {};     // [N + 1] int64 with B = 1: 0, the ends of packed sequences; undefined: N = B
};

struct DeltaRuleOutput {
  at::Tensor o;            // [B, T, HV, V], the dtype of v
  at::Tensor final_state;  // [N, HV, K, V], float32 (float64 for float64 inputs)
};

// S̃_t = D_t S_{t−1}, S_t = S̃_t + k_t (b_t v_t − a_t S̃_tᵀ k_t)ᵀ, o_t = scale · S_tᵀ q_t: equation 20 of the EFLA paper
// for the step size exact without decay. rule.decay follows from g and need not be set. Gradients flow to all but
// cu_seqlens, from both outputs. implementation: as RunOptions. Throws Error naming the tensor.
DeltaRuleOutput delta_rule(const DeltaRuleInput& input, const DeltaRule& rule,
                           const std::string& implementation = "auto");

// The same from a zero state with q, k and v side by side in one tensor, and their gradients likewise: a mixer's fused
// projection goes in and out without a copy. qkv [B, T, 2·H·K + HV·V]: the heads of q, then of k, then of v; HV is
// beta's. g and cu_seqlens as above, or undefined. Returns o.
at::Tensor delta_rule_packed(const at::Tensor& qkv, const at::Tensor& beta, const at::Tensor& g, std::int64_t heads,
                             std::int64_t key_dim, const DeltaRule& rule, const at::Tensor& cu_seqlens = {},
                             const std::string& implementation = "auto");

// Decoding: one token. q, k [B, H, K], v [B, HV, V], beta [B, HV], g [B, HV], [B, HV, K] or undefined; state [B, HV, K,
// V], float32 or bfloat16, is updated in place. Returns o [B, HV, V]. Not differentiable.
at::Tensor delta_rule_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& beta,
                           const at::Tensor& g, at::Tensor& state, const DeltaRule& rule,
                           const std::string& implementation = "auto");

// Decoding from a pool of states: T tokens, 1 to kMaxStepTokens. q, k [B, T, H, K], v [B, T, HV, V], beta [B, T, HV],
// g [B, T, HV], [B, T, HV, K] or undefined; states [P, HV, K, V], float32 or bfloat16, are updated in place. slots [B]
// int64 names the state of each batch entry, no two alike, or −1 for an entry without a state, whose outputs are zeros;
// undefined: entry b has state b. kept [B] int64 says how many of its tokens each entry's state keeps, 0 to T;
// undefined: all. Returns o [B, T, HV, V]. Not differentiable.
at::Tensor delta_rule_steps(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& beta,
                            const at::Tensor& g, at::Tensor& states, const at::Tensor& slots, const at::Tensor& kept,
                            const DeltaRule& rule, const std::string& implementation = "auto");

}  // namespace efla::autograd
