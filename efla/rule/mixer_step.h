// The contract of a mixer's part of a decode step between the projections of its input and the projection of its
// output: short convolution, activations, the delta rule, output norm and output gate of one token per text.
// docs/ops/mixer_step.md describes the operator.
#pragma once

#include <cstdint>

#include "efla/base/device.h"
#include "efla/base/view.h"
#include "efla/rule/decay_activation.h"
#include "efla/rule/problem.h"
#include "efla/rule/rms_norm.h"

namespace efla {

// The function that is applied to the projection of β; with `one` there is no projection and the result is 1.
enum class BetaActivation { sigmoid, softplus, one };

// With the sizes of rule/problem.h, C = 2·H·K + HV·V channels (q, k and v), W taps and a pool of P states:
//
//   u = silu(Σ_j taps[:, j] · x_j) of the last W rows x_j of qkv, the current row last; q, k, v are columns of u
//   β = act(beta) · beta_factor,    g as in decay_activation.h with z = decay and bias = decay_bias
//   o = norm(rule(q, k, v, β, g)) · act(gate + gate_bias), the norm per head as in rms_norm.h
struct MixerStep {
  DeltaShape shape;  // tokens is 1
  DeltaRule rule;
  View<const float, 2> qkv;   // [B, C]
  View<const float, 2> taps;  // [C, W]
  View<const float, 2> beta;  // [B, HV]; absent if beta_activation is one
  BetaActivation beta_activation = BetaActivation::sigmoid;
  View<const float, 1> beta_factor;  // [HV]
  View<const float, 2> decay = {};   // [B, HV] or [B, HV·K] by rule.decay; absent without decay
  DecayActivation decay_activation = DecayActivation::softplus;
  View<const float, 1> rate = {};         // [HV], with a decay
  View<const float, 1> decay_bias = {};   // [HV] or [HV·K], with a decay
  float bound = 0.0F;                     // of DecayActivation::sigmoid
  View<const float, 1> norm_weight = {};  // [V], optional: without it there is no norm
  float norm_eps = 1e-6F;
  View<const float, 2> gate = {};       // [B, HV·V], optional
  View<const float, 1> gate_bias = {};  // [HV·V], optional
  GateActivation gate_activation = GateActivation::silu;
  View<const std::int64_t, 1> slots = {};  // [B], as in DeltaStep
  View<float, 3> history;                  // [P, W − 1, C], the rows of qkv before this one, updated
  View<float, 4> states;                   // [P, HV, K, V], updated
  View<float, 2> o;                        // [B, HV·V]

  constexpr std::int64_t channels() const {
    return 2 * shape.heads * shape.key_dim + shape.value_heads * shape.value_dim;
  }
};

// Throws Error as validate of rule/validate.h does.
void validate(const MixerStep& problem, const Device& device = {});

}  // namespace efla
