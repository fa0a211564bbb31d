// The chunkwise kernels that keep every operand in float32: products by TF32 (products.cuh), chunks of
// kWideTokens tokens. How they cut a problem is as in chunk/chunk.h: every chunk of a sequence has a slot, and per slot
// and value head there are a record and the vectors of its tokens in the workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "efla/cuda/delta.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

inline constexpr int kWideTokens = 32;
inline constexpr int kWideColumns = 64;  // value columns per thread block

// As ChunkRecord (chunk/chunk.h): the chunk maps the state S before it to
//
//   E = kᵀ S,  R = b∘v − read∘E,  (I + A) U = R,  o = out∘(qᵀ S) + P U,  S ← γ_C S + k (write∘U)
//
// with A_ij = a_i n_i n_j Γ_ij k_iᵀ k_j for i > j. U is computed by forward substitution over blocks of 8 tokens, which
// loses fewer digits than the product with the inverse where tokens erase most of the state.
// `solve` and P are images of tiles (tile.cuh).
struct WideRecord {
  alignas(128) float solve[kWideTokens * kWideTokens];  // −A, but on the diagonal the inverse of the block of I + A
  float p[kWideTokens * kWideTokens];                   // scale n_q,i n_k,j Γ_ij q_iᵀ k_j for i ≥ j
  float b[kWideTokens];                                 // write gain
  float read[kWideTokens];                              // a_i γ_i n_k,i
  float write[kWideTokens];                             // n_k,i γ_C/γ_i
  float out[kWideTokens];                               // scale γ_i n_q,i
  alignas(16) float decay;                              // γ_C
};
static_assert(sizeof(WideRecord) % 128 == 0);

// What the gradients need of a chunk's tokens besides the record.
struct WideVectors {
  alignas(128) double prefix[kWideTokens];                   // log γ_i
  float a[kWideTokens], b[kWideTokens];                      // gains
  float lambda[kWideTokens];                                 // ‖k̂‖²
  float key_factor[kWideTokens], query_factor[kWideTokens];  // n_k and n_q of the L2 norm
};

struct WideProblem {
  DeltaForward<float> p;
  WideRecord* records = nullptr;   // [slots][HV]
  WideVectors* vectors = nullptr;  // [slots][HV]; of the backward alone
  std::int64_t slots = 0;
  std::int64_t slots_per_sequence = 0;  // 0: packed
  float scale = 0;
  bool q_rows = false, k_rows = false;  // rows that 16-byte accesses can read
};

// With dO the gradient of o, dS' the one of the state after the chunk, and D the gradient of the residual R:
//
//   dU = write∘(k dS') + Pᵀ dO,   (I + A)ᵀ D = dU,   dS = γ_C dS' + (out∘q)ᵀ dO − (read∘k)ᵀ D
struct WideBackward {
  DeltaBackward<float> p;
  WideProblem forward;                             // the same inputs, with records
  float *states = nullptr, *dstates = nullptr;     // S before the chunk and dS' [slots][HV][slices], columns by keys
  float *writes = nullptr, *dresiduals = nullptr;  // U and D [slots][HV][slices], tokens by columns
  int slices = 0;
  bool dout_rows = false;  // as in WideProblem
};

// K as the kernels have it.
inline constexpr int kWideKeys = 64;
static_assert(kWideKeys == kWideMaxKeyDim);

// Slots of all sequences: of packed ones a bound that needs no look at cu_seqlens.
constexpr std::int64_t wide_slots(const DeltaShape& s) {
  if (s.packed > 0) return s.tokens / kWideTokens + s.packed;
  return s.batch * ((s.tokens + kWideTokens - 1) / kWideTokens);
}

// Launches the kernel that writes every record, and the vectors where the problem has a place for them.
void launch_wide_prepare(const WideProblem& problem, cudaStream_t stream);

// Launches the sweep over the state that writes outputs, final and saved states.
void launch_wide_sweep(const WideProblem& problem, cudaStream_t stream);

// Launch, in this order after `prepare`: the forward sweep that writes S and U from the saved states on, the reverse
// sweep that writes dS' and D, and the products that give the gradients of the inputs.
void launch_wide_states(const WideBackward& problem, cudaStream_t stream);
void launch_wide_reverse(const WideBackward& problem, cudaStream_t stream);
void launch_wide_grads(const WideBackward& problem, cudaStream_t stream);

}  // namespace efla::gpu
