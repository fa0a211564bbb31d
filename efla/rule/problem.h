// The contract of the operator: the inputs and outputs of a forward, a backward and a decode step.
//
//   S̃_t = D_t S_{t−1},    S_t = S̃_t + k_t (b_t v_t − a_t S̃_tᵀ κ_t)ᵀ,    o_t = scale · S_tᵀ q_t
//
// per sequence and value head, with S [K, V], the decay D_t of decay.h, gains a_t, b_t of step_size.h, and κ_t = k_t
// without two keys. Sizes: B batch, T tokens (steps, where a token has several: micro_steps.h), H query and key heads,
// HV value heads (a multiple of H; head h uses query head h / (HV/H)), K key dim, V value dim, N sequences, NC chunks.
#pragma once

#include <cmath>
#include <cstdint>

#include "efla/base/dtype.h"
#include "efla/base/view.h"
#include "efla/rule/decay.h"
#include "efla/rule/step_size.h"

namespace efla {

// Tokens per chunk of the kernels on the CPU, and tokens between two states that these kernels save.
inline constexpr std::int64_t kChunk = 32;

// ε of the L2 norm, x/√(Σx² + ε).
inline constexpr double kL2NormEpsilon = 1e-6;

struct DeltaShape {
  std::int64_t batch = 0, tokens = 0, heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  // Number of sequences packed into the tokens of a single batch entry (cu_seqlens); 0: each batch entry is a sequence.
  std::int64_t packed = 0;

  constexpr std::int64_t sequences() const { return packed > 0 ? packed : batch; }
  // Returns the number of saved states per batch entry: one per `interval` tokens; an upper bound if sequences are
  // packed.
  constexpr std::int64_t chunks(std::int64_t interval = kChunk) const {
    return packed > 0 ? tokens / interval + packed : (tokens + interval - 1) / interval;
  }
  constexpr std::int64_t group() const { return value_heads / heads; }  // value heads per query head
};

// How an implementation saves the states from which its backward starts.
struct SavedStates {
  std::int64_t interval = kChunk;  // tokens of a sequence between two states; 0 in an implementation that saves none

  constexpr bool operator==(const SavedStates&) const = default;
};

// The place of a sequence: its batch entry, its tokens [begin, end), and the index of its first saved state.
struct Sequence {
  std::int64_t i_b = 0, begin = 0, end = 0, first_chunk = 0, interval = kChunk;

  // Returns the index of the saved state before token t, which is the first token of an interval.
  constexpr std::int64_t chunk(std::int64_t t) const { return first_chunk + (t - begin) / interval; }
};

struct DeltaRule {
  StepSize step;
  Decay decay = Decay::none;
  bool qk_l2norm = false;  // divide q and k by √(Σx² + kL2NormEpsilon) first, and κ by the number that divides k
  bool two_keys = false;   // κ is a tensor of its own, erase_key; otherwise κ = k
  double scale = NAN;      // factor on the output; NaN: K^(−1/2)

  double scale_for(std::int64_t key_dim) const {
    return std::isnan(scale) ? 1.0 / std::sqrt(static_cast<double>(key_dim)) : scale;
  }
};

// Inputs first, outputs last. A view without data is absent. Outputs that are present are fully overwritten, except the
// slots of chunk_states that no sequence uses. Outputs must overlap neither inputs nor each other, because
// implementations read inputs after they have written outputs. Only the states of decode steps are updated in place.
template <class T>
struct DeltaForward {
  DeltaShape shape;
  DeltaRule rule;
  View<const T, 4> q, k;      // [B, T, H, K]
  View<const T, 4> v;         // [B, T, HV, V]
  View<const T, 3> beta;      // [B, T, HV]
  View<const State<T>, 4> g;  // [B, T, HV, 1 or K] by rule.decay; absent without decay
  // [N + 1] if sequences are packed: 0, the end of each sequence. In the memory of the problem's device, like all
  // views.
  View<const std::int64_t, 1> cu_seqlens;
  View<const State<T>, 4> initial_state;  // [N, HV, K, V], optional; absent: zeros
  View<T, 4> o;                           // [B, T, HV, V]
  View<State<T>, 4> final_state;          // [N, HV, K, V], optional
  // [B, NC, HV, K, V], optional: the state before every saved.interval tokens of a sequence.
  View<State<T>, 5> chunk_states;
  SavedStates saved = {};  // as the implementation saves them: Choice::saved of choose_delta_forward (ops/delta.h)
  View<const T, 4> erase_key = {};  // [B, T, H, K] κ, if rule.two_keys
};

// The gradients of a loss. dout and dfinal_state are its gradients with respect to o and to the final state.
template <class T>
struct DeltaBackward {
  DeltaShape shape;
  DeltaRule rule;
  View<const T, 4> q, k, v;  // as in DeltaForward
  View<const T, 3> beta;
  View<const State<T>, 4> g;
  View<const std::int64_t, 1> cu_seqlens;
  View<const State<T>, 5> chunk_states;  // [B, NC, HV, K, V], as the forward wrote them
  View<const T, 4> dout;                 // [B, T, HV, V]
  View<const State<T>, 4> dfinal_state;  // [N, HV, K, V], optional; absent: zeros
  View<T, 4> dq, dk, dv;                 // as q, k, v; dq and dk are summed over the value heads of a query head
  View<T, 3> dbeta;                      // as beta
  View<State<T>, 4> dg;                  // as g
  View<State<T>, 4> dinitial_state;      // [N, HV, K, V], optional
  SavedStates saved = {};                // as in DeltaForward
  View<const T, 4> erase_key = {};       // [B, T, H, K] κ, if rule.two_keys
  View<T, 4> derase_key = {};            // as erase_key, summed over the value heads of a query head
};

// Copies what a forward and its backward read alike, without states.
template <class From, class To>
void copy_inputs(const From& from, To& to) {
  to.shape = from.shape;
  to.rule = from.rule;
  to.q = from.q;
  to.k = from.k;
  to.v = from.v;
  to.beta = from.beta;
  to.g = from.g;
  to.cu_seqlens = from.cu_seqlens;
  to.erase_key = from.erase_key;
}

// Returns a backward with the inputs and the saved states of a forward, and without gradients.
template <class T>
DeltaBackward<T> backward_of(const DeltaForward<T>& p) {
  DeltaBackward<T> backward;
  copy_inputs(p, backward);
  backward.chunk_states = p.chunk_states;
  backward.saved = p.saved;
  return backward;
}

// A decode step: one token per batch entry; the state is updated in place. A state of type bfloat16 (S) is widened to
// float32, updated and rounded back at every token. With slots the states are a pool [P, HV, K, V].
template <class T, class S = State<T>>
struct DeltaStep {
  DeltaShape shape;  // tokens is 1; not packed
  DeltaRule rule;
  View<const T, 3> q, k;      // [B, H, K]
  View<const T, 3> v;         // [B, HV, V]
  View<const T, 2> beta;      // [B, HV]
  View<const State<T>, 3> g;  // [B, HV, 1 or K] by rule.decay; absent without decay
  View<S, 4> state;           // [B, HV, K, V], updated in place
  View<T, 3> o;               // [B, HV, V]
  // [B], optional: the index of each batch entry's state, no two alike. A batch entry with −1 has no state, and its
  // outputs are zeros. Absent: batch entry b has state b.
  View<const std::int64_t, 1> slots = {};
  View<const T, 3> erase_key = {};  // [B, H, K] κ, if rule.two_keys

  std::int64_t slot(std::int64_t i_b) const { return slots ? slots(i_b) : i_b; }
};

inline constexpr std::int64_t kMaxStepTokens = 8;

// Decode steps of one to kMaxStepTokens tokens per batch entry, with the results of one DeltaStep per token.
template <class T, class S = State<T>>
struct DeltaSteps {
  DeltaShape shape;  // not packed
  DeltaRule rule;
  View<const T, 4> q, k;              // [B, T, H, K]
  View<const T, 4> v;                 // [B, T, HV, V]
  View<const T, 3> beta;              // [B, T, HV]
  View<const State<T>, 4> g;          // [B, T, HV, 1 or K] by rule.decay; absent without decay
  View<const std::int64_t, 1> slots;  // as in DeltaStep
  View<S, 4> states;                  // [P, HV, K, V], updated in place; [B, HV, K, V] without slots
  View<T, 4> o;                       // [B, T, HV, V]
  // [B], optional: the number of tokens, 0 to T, that each batch entry's state keeps. The state after the call is the
  // state after these tokens; later tokens are rolled back. The outputs of all tokens are computed. Absent: T. On a GPU
  // values outside of 0 to T are clamped.
  View<const std::int64_t, 1> kept = {};
  View<const T, 4> erase_key = {};  // [B, T, H, K] κ, if rule.two_keys
};

// Returns the place of sequence n of a forward or a backward.
template <class Problem>
constexpr Sequence sequence_of(const Problem& p, std::int64_t n) {
  const std::int64_t interval = p.saved.interval;
  if (p.shape.packed == 0) return {n, 0, p.shape.tokens, 0, interval};
  const std::int64_t begin = p.cu_seqlens(n);
  return {0, begin, p.cu_seqlens(n + 1), begin / interval + n, interval};
}

}  // namespace efla
