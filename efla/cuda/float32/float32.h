// The chunkwise kernels that keep every operand in float32: products by TF32 (products.cuh), chunks of
// kFloat32Tokens tokens. How they cut a problem is as in chunk/chunk.h: every chunk of a sequence has a slot, and per
// slot and value head there are a record and the vectors of its tokens in the workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "efla/cuda/delta.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

inline constexpr int kFloat32Tokens = 32;
inline constexpr int kFloat32Columns = 64;  // value columns per thread block

// As ChunkRecord (chunk/chunk.h): the chunk maps the state S before it to
//
//   E = k S,  R = b∘v − read∘E,  (I + A) U = R,  o = out∘(q S) + P U,  S ← γ_C S + kᵀ (write∘U)
//
// with A_ij = a_i n_i n_j Γ_ij k_iᵀ k_j for i > j. U is computed by forward substitution over blocks of 8 tokens, which
// loses fewer digits than the product with the inverse where tokens erase most of the state.
// `solve` and P are images of tiles (tile.cuh).
struct Float32Record {
  alignas(
      128) float solve[kFloat32Tokens * kFloat32Tokens];  // −A, but on the diagonal the inverse of the block of I + A
  float p[kFloat32Tokens * kFloat32Tokens];               // scale n_q,i n_k,j Γ_ij q_iᵀ k_j for i ≥ j
  float b[kFloat32Tokens];                                // write gain
  float read[kFloat32Tokens];                             // a_i γ_i n_k,i
  float write[kFloat32Tokens];                            // n_k,i γ_C/γ_i
  float out[kFloat32Tokens];                              // scale γ_i n_q,i
  alignas(16) float decay;                                // γ_C
};
static_assert(sizeof(Float32Record) % 128 == 0);

// With a gate per key channel γ_i is a vector over the channels. The gates and the L2 norm go into the keys and
// queries: E reads γ_i∘k̂_i, o reads γ_i∘q̂_i, and the state gets γ_C/γ_i∘k̂_i. The record's vectors then are without
// both, and γ_C is here. Images of tiles (tile.cuh) of KD channels.
template <int KD>
struct Float32ChannelRecord {
  alignas(128) float k[kFloat32Tokens * KD], written[kFloat32Tokens * KD];
  float decay[KD];
  Float32Record record;
  float q[kFloat32Tokens * KD];
};

// What the gradients need of a chunk's tokens besides the record.
struct Float32Vectors {
  alignas(128) double prefix[kFloat32Tokens];                      // log γ_i
  float a[kFloat32Tokens], b[kFloat32Tokens];                      // gains
  float lambda[kFloat32Tokens];                                    // ‖k̂‖²
  float key_factor[kFloat32Tokens], query_factor[kFloat32Tokens];  // n_k and n_q of the L2 norm
};

struct Float32Problem {
  DeltaForward<float> p;
  void* records = nullptr;            // [slots][HV], Float32Record or, with a gate per channel, Float32ChannelRecord
  Float32Vectors* vectors = nullptr;  // [slots][HV]; of the backward alone
  std::int64_t slots = 0;
  std::int64_t slots_per_sequence = 0;  // 0: packed
  float scale = 0;
  bool q_rows = false, k_rows = false, g_rows = false;  // rows that 16-byte accesses can read
};

// With dO the gradient of o, dS' the one of the state after the chunk, and D the gradient of the residual R:
//
//   dU = write∘(k dS') + Pᵀ dO,   (I + A)ᵀ D = dU,   dS = γ_C dS' + (out∘q)ᵀ dO − (read∘k)ᵀ D
struct Float32Backward {
  DeltaBackward<float> p;
  Float32Problem forward;                          // the same inputs, with records
  float *states = nullptr, *dstates = nullptr;     // S before the chunk and dS' [slots][HV][slices], columns by keys
  float *writes = nullptr, *dresiduals = nullptr;  // U and D [slots][HV][slices], tokens by columns
  int slices = 0;
  bool dout_rows = false;  // as in Float32Problem
};

// K as the kernels have it.
constexpr int float32_keys(const DeltaShape& s) { return s.key_dim <= 64 ? 64 : 128; }

constexpr std::size_t float32_record_bytes(const DeltaShape& s, const DeltaRule& rule) {
  if (rule.decay != Decay::channel) return sizeof(Float32Record);
  return float32_keys(s) == 64 ? sizeof(Float32ChannelRecord<64>) : sizeof(Float32ChannelRecord<128>);
}

// The shared memory that a thread block needs for K above 64, which not every GPU has; kChannel: with a gate per key
// channel.
template <bool kChannel>
inline constexpr int kFloat32LargeBytes = (kChannel ? 150 : 120) * 1024;

// Slots of all sequences; of packed ones an upper bound, because the host does not read cu_seqlens.
constexpr std::int64_t float32_slots(const DeltaShape& s) {
  if (s.packed > 0) return s.tokens / kFloat32Tokens + s.packed;
  return s.batch * ((s.tokens + kFloat32Tokens - 1) / kFloat32Tokens);
}

// Launches the kernel that writes every record, and the vectors where the problem has a place for them.
void launch_float32_prepare(const Float32Problem& problem, cudaStream_t stream);

// The same where every key channel has a gate: writes records of its kind.
void launch_float32_prepare_channel(const Float32Problem& problem, cudaStream_t stream);

// Launches the sweep over the state that writes outputs, final and saved states.
void launch_float32_sweep(const Float32Problem& problem, cudaStream_t stream);

// Launch, in this order after `prepare`: the forward sweep that writes S and U from the saved states on, the reverse
// sweep that writes dS' and D, and the products that give the gradients of the inputs.
void launch_float32_states(const Float32Backward& problem, cudaStream_t stream);
void launch_float32_reverse(const Float32Backward& problem, cudaStream_t stream);
void launch_float32_grads(const Float32Backward& problem, cudaStream_t stream);

// The same products where every key channel has a gate.
void launch_float32_grads_channel(const Float32Backward& problem, cudaStream_t stream);

}  // namespace efla::gpu
