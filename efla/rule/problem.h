// The contract of the operator: what a forward, a backward and a decode step read and write.
//
//   S_t = S_{t−1} + k_t (b_t v_t − a_t S_{t−1}ᵀ k_t)ᵀ,    o_t = scale · S_tᵀ q_t
//
// per batch entry and head, with S [K, V] and the gains a_t, b_t of step_size.h. Sizes: B batch, T tokens, H query and
// key heads, HV value heads (here HV = H), K key dim, V value dim, NC = ⌈T/kChunk⌉ chunks.
#pragma once

#include <cmath>
#include <cstdint>

#include "efla/base/dtype.h"
#include "efla/base/view.h"
#include "efla/rule/decay.h"
#include "efla/rule/step_size.h"

namespace efla {

// Tokens between two saved states, and the chunk of the chunkwise form.
inline constexpr std::int64_t kChunk = 32;

// ε of the L2 norm, x/√(Σx² + ε).
inline constexpr double kL2NormEpsilon = 1e-6;

struct DeltaShape {
  std::int64_t batch = 0, tokens = 0, heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;

  std::int64_t chunks() const { return (tokens + kChunk - 1) / kChunk; }
};

struct DeltaRule {
  StepSize step;
  Decay decay = Decay::none;
  bool qk_l2norm = false;  // q and k are divided by √(Σx² + kL2NormEpsilon) first
  double scale = NAN;      // of the output; NaN stands for K^(−1/2)

  double scale_for(std::int64_t key_dim) const {
    return std::isnan(scale) ? 1.0 / std::sqrt(static_cast<double>(key_dim)) : scale;
  }
};

// Inputs first, outputs last. A view without data is absent; outputs present are fully overwritten.
template <class T>
struct DeltaForward {
  DeltaShape shape;
  DeltaRule rule;
  View<const T, 4> q, k;                  // [B, T, H, K]
  View<const T, 4> v;                     // [B, T, HV, V]
  View<const T, 3> beta;                  // [B, T, HV]
  View<const State<T>, 4> initial_state;  // [B, HV, K, V], optional: zeros
  View<T, 4> o;                           // [B, T, HV, V]
  View<State<T>, 4> final_state;          // [B, HV, K, V], optional
  View<State<T>, 5> chunk_states;         // [B, NC, HV, K, V], optional: the state before each chunk, for the backward
};

// The gradients of a loss whose gradient with respect to o and the final state is dout and dfinal_state.
template <class T>
struct DeltaBackward {
  DeltaShape shape;
  DeltaRule rule;
  View<const T, 4> q, k, v;  // as in DeltaForward
  View<const T, 3> beta;
  View<const State<T>, 5> chunk_states;  // [B, NC, HV, K, V], as the forward wrote them
  View<const T, 4> dout;                 // [B, T, HV, V]
  View<const State<T>, 4> dfinal_state;  // [B, HV, K, V], optional: zeros
  View<T, 4> dq, dk, dv;                 // as q, k, v
  View<T, 3> dbeta;                      // as beta
  View<State<T>, 4> dinitial_state;      // [B, HV, K, V], optional
};

// One token for every batch entry; the state is read and overwritten.
template <class T>
struct DeltaStep {
  DeltaShape shape;  // tokens is 1
  DeltaRule rule;
  View<const T, 3> q, k;    // [B, H, K]
  View<const T, 3> v;       // [B, HV, V]
  View<const T, 2> beta;    // [B, HV]
  View<State<T>, 4> state;  // [B, HV, K, V], updated in place
  View<T, 3> o;             // [B, HV, V]
};

}  // namespace efla
