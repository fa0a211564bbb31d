// The contract of the decay gate: the decay g of a mixer, one per head (Gated DeltaNet, arXiv 2412.06464) or one per
// key channel (Kimi Delta Attention, arXiv 2510.26692), from its projection z. docs/ops/decay_gate.md describes the
// operator.
#pragma once

#include "efla/base/dtype.h"
#include "efla/base/view.h"
#include "efla/rule/decay_activation.h"

namespace efla {

// With N tokens, HV heads of C channels (C is 1 with one decay per head), rate = exp(a_log) of the head and x = z +
// bias:
//
//   softplus   g = −rate · softplus(x)
//   sigmoid    g = bound · σ(rate · x)
//
// T is float or bfloat16. Beside the rate, exponentials are taken of −|x| and −|rate · x| alone, so that no finite x
// overflows: softplus(x) approaches x or 0, and σ(x) 1 or 0, also where x is infinite. decay_activation.h bounds the
// rate. NaN gives NaN.
template <class T>
struct DecayGateForward {
  View<const T, 2> z;          // [N, HV·C]
  View<const float, 1> bias;   // [HV·C]
  View<const float, 1> a_log;  // [HV]
  DecayActivation activation = DecayActivation::softplus;
  float bound = 0.0F;  // of DecayActivation::sigmoid, below 0 and finite
  View<float, 2> g;    // [N, HV·C]
};

// The gradients of a loss whose gradient with respect to g is dg. g is computed again.
//
//   softplus   dz = −rate · σ(x) · dg                   da_log = Σ_rows Σ_channels g · dg
//   sigmoid    dz = bound · rate · σ′(rate · x) · dg    da_log = Σ_rows Σ_channels x · dz
//   both       dbias = Σ_rows dz
//
// The sums add float32 values of dz, before dz is rounded to T. With softplus, da_log is infinite where x is ∞. With
// sigmoid, da_log is NaN where x is infinite, because x · dz is ∞ · 0 there.
template <class T>
struct DecayGateBackward {
  View<const T, 2> z;          // [N, HV·C]
  View<const float, 1> bias;   // [HV·C]
  View<const float, 1> a_log;  // [HV]
  DecayActivation activation = DecayActivation::softplus;
  float bound = 0.0F;
  View<const float, 2> dg;  // [N, HV·C]
  View<T, 2> dz;            // [N, HV·C], may be z
  View<float, 1> dbias;     // [HV·C]
  View<float, 1> da_log;    // [HV]
};

// Throws Error as validate of rule/validate.h does.
template <class T>
void validate(const DecayGateForward<T>& problem);
template <class T>
void validate(const DecayGateBackward<T>& problem);

}  // namespace efla
