// The kernels of the chunk algorithm for float32 inputs. Every operand of a product is the sum of two TF32 numbers
// (products.cuh), and chunks have kFloat32Tokens tokens. Problems are divided as in chunk/chunk.h, which defines the
// words: every chunk of a sequence has a slot, and the workspace has a record per slot and value head, in the backward
// also the vectors of the chunk's tokens. docs/design/2026-11-cuda-float32.md explains the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "efla/cuda/common/decayed_rows.h"
#include "efla/cuda/delta.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

inline constexpr int kFloat32Tokens = 32;
inline constexpr int kFloat32Columns = 64;  // value columns per thread block

// The record of a chunk and value head, in the symbols of ChunkRecord (chunk/chunk.h). The chunk maps the state S
// before it to
//
//   E = k S,  R = b∘v − read∘E,  (I + A) U = R,  o = out∘(q S) + P U,  S ← γ_C S + kᵀ (write∘U)
//
// with A_ij = a_i n_k,i n_k,j Γ_ij k_i·k_j for i > j. U is computed by forward substitution over blocks of 8 tokens.
// Where tokens erase most of the state, this loses fewer digits than the product with the inverse. `solve` and P are
// images of tiles (tile.cuh).
struct Float32Record {
  alignas(
      128) float solve[kFloat32Tokens * kFloat32Tokens];  // −A, but on the diagonal the inverse of the block of I + A
  float p[kFloat32Tokens * kFloat32Tokens];               // scale n_q,i n_k,j Γ_ij q_i·k_j for i ≥ j
  float b[kFloat32Tokens];                                // write gain
  float read[kFloat32Tokens];                             // a_i γ_i n_k,i
  float write[kFloat32Tokens];                            // n_k,i γ_C/γ_i
  float out[kFloat32Tokens];                              // scale γ_i n_q,i
  alignas(16) float decay;                                // γ_C
};
static_assert(sizeof(Float32Record) % 128 == 0);

// The record and the decayed keys and queries where every key channel has a gate, or where the rule has two keys. γ_i
// is then a vector over the channels. With k̂ = n_k k, κ̂ = n_k κ and q̂ = n_q q, E reads γ_i∘κ̂_i (`k`), where κ̂ is k̂ if
// the rule has one key, the state gets γ_C/γ_i∘k̂_i (`written`), and o reads γ_i∘q̂_i (`q`). The vectors of the record
// are then without γ, n_k and n_q, and γ_C is `decay`. k, written and q are images of tiles (tile.cuh) of KD channels.
template <int KD>
struct Float32ChannelRecord {
  alignas(128) float k[kFloat32Tokens * KD], written[kFloat32Tokens * KD];
  float decay[KD];
  Float32Record record;
  float q[kFloat32Tokens * KD];
};

// The numbers of a chunk's tokens that the gradients need besides the record.
struct Float32Vectors {
  alignas(128) double prefix[kFloat32Tokens];                      // log γ_i
  float a[kFloat32Tokens], b[kFloat32Tokens];                      // gains
  float lambda[kFloat32Tokens];                                    // ‖k̂‖², or κ̂·k̂ with two keys
  float key_factor[kFloat32Tokens], query_factor[kFloat32Tokens];  // n_k and n_q of the L2 norm
};

// A forward problem with its workspace.
struct Float32Problem {
  static constexpr int kTokens = kFloat32Tokens;
  DeltaForward<float> p;
  void* records = nullptr;            // [slots][HV], Float32ChannelRecord if has_decayed_rows, else Float32Record
  Float32Vectors* vectors = nullptr;  // [slots][HV]; only in the backward
  std::int64_t slots = 0;
  std::int64_t slots_per_sequence = 0;  // 0 if sequences are packed
  float scale = 0;
  // Whether rows can be read in pieces of 16 bytes.
  bool q_rows = false, k_rows = false, g_rows = false, erase_rows = false;
};

// A backward problem with its workspace. Let dO be the gradient of o, dS' the gradient of the state after the chunk,
// and D the gradient of the residual R:
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

// Returns the number of keys per state in the kernels, 64 or 128.
constexpr int float32_keys(const DeltaShape& s) { return s.key_dim <= 64 ? 64 : 128; }

// Returns the size of a record of the problem, in bytes.
constexpr std::size_t float32_record_bytes(const DeltaShape& s, const DeltaRule& rule) {
  if (!has_decayed_rows(rule)) return sizeof(Float32Record);
  return float32_keys(s) == 64 ? sizeof(Float32ChannelRecord<64>) : sizeof(Float32ChannelRecord<128>);
}

// The bytes of shared memory that a thread block needs for K above 64, at most; not every GPU has them. kChannel: with
// decayed rows (has_decayed_rows).
template <bool kChannel>
inline constexpr int kFloat32LargeBytes = (kChannel ? 150 : 120) * 1024;

// Returns the number of slots. If sequences are packed it is an upper bound, because the host does not read cu_seqlens.
constexpr std::int64_t float32_slots(const DeltaShape& s) {
  if (s.packed > 0) return s.tokens / kFloat32Tokens + s.packed;
  return s.batch * ((s.tokens + kFloat32Tokens - 1) / kFloat32Tokens);
}

// Launches the kernel that writes every record and, if problem.vectors is not null, all vectors. Every launch function
// here throws CudaError where the launch fails.
void launch_float32_prepare(const Float32Problem& problem, cudaStream_t stream);

// Launches the kernel that writes every Float32ChannelRecord and the vectors.
void launch_float32_prepare_channel(const Float32Problem& problem, cudaStream_t stream);

// Launches the sweep, which writes outputs, final states and saved states.
void launch_float32_sweep(const Float32Problem& problem, cudaStream_t stream);

// Launch the kernels of the backward, in this order after `prepare`: the forward sweep, which starts at every saved
// state and writes S and U; the reverse sweep, which writes dS', D and dinitial_state; and the products that give the
// gradients of the inputs.
void launch_float32_states(const Float32Backward& problem, cudaStream_t stream);
void launch_float32_reverse(const Float32Backward& problem, cudaStream_t stream);
void launch_float32_grads(const Float32Backward& problem, cudaStream_t stream);

// Launches the gradients of the inputs for problems with Float32ChannelRecord.
void launch_float32_grads_channel(const Float32Backward& problem, cudaStream_t stream);

}  // namespace efla::gpu
