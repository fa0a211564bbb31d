// The delta rule on tensors, differentiable. Registered as the ops efla::delta_rule and efla::delta_rule_step too.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

#include "efla/rule/problem.h"

namespace efla::autograd {

struct DeltaRuleOutput {
  at::Tensor o;            // [B, T, H, V], the dtype of v
  at::Tensor final_state;  // [B, H, K, V], float32 (float64 for float64 inputs)
};

// S_t = S_{t−1} + k_t (b_t v_t − a_t S_{t−1}ᵀ k_t)ᵀ, o_t = scale · S_tᵀ q_t: equation 20 of the EFLA paper for the step
// size exact. q, k [B, T, H, K], v [B, T, H, V], beta [B, T, H]: float32 or bfloat16 (or float64, which the
// implementation "ref" alone takes), all alike, with any strides. initial_state [B, H, K, V] as final_state, undefined
// for zeros. Gradients flow to all five, from both outputs. implementation: as RunOptions. Throws Error naming the
// tensor.
DeltaRuleOutput delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& beta,
                           const at::Tensor& initial_state, const DeltaRule& rule,
                           const std::string& implementation = "auto");

// The same from a zero state with q, k and v side by side in one tensor, and their gradients likewise: a mixer's fused
// projection goes in and out without a copy. qkv [B, T, 2·H·K + H·V]: the heads of q, those of k, those of v; H is
// beta's. Returns o.
at::Tensor delta_rule_packed(const at::Tensor& qkv, const at::Tensor& beta, std::int64_t key_dim, const DeltaRule& rule,
                             const std::string& implementation = "auto");

// Decoding: one token. q, k [B, H, K], v [B, H, V], beta [B, H]; state [B, H, K, V] is updated in place. Returns o
// [B, H, V]. Not differentiable.
at::Tensor delta_rule_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& beta,
                           at::Tensor& state, const DeltaRule& rule, const std::string& implementation = "auto");

}  // namespace efla::autograd
