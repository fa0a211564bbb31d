// How the chunk kernels divide a problem, and what they exchange through the workspace. docs/equations.md has the
// equations (the chunk algorithm, decay); docs/design/2026-11-cuda-forward.md explains the kernels. Words:
//
//   chunk    kChunkTokens consecutive tokens of a sequence; the last chunk of a sequence may have fewer
//   slot     the number of a chunk among the chunks of all sequences
//   slice    64 value columns
//   piece    16 bytes of a row
//   tile     64 rows of 64 elements in shared memory (common/tile.cuh)
//   image    the bytes of one or more tiles, in shared memory or in the workspace
//   record   what `prepare` computes of a chunk and value head without the state, and a sweep reads
//   sweep    a kernel that carries the state from chunk to chunk
//   walk     the chunks that one thread block of a sweep visits, in order
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "efla/cuda/common/decayed_rows.h"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/delta.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

inline constexpr int kChunkTokens = kRowsPerTile;  // so that a chunk's rows of 64 elements are one tile

// The record of a chunk and value head. For token i of the chunk, γ_i is the decay from the chunk's start to i, γ_C the
// decay over the chunk, and Γ_ij = γ_i/γ_j the decay from token j to token i. a and b are the erase and write gains,
// n_k and n_q the factors of the L2 norm, which are 1 without the norm. With tokens as rows of k, q, v and o, and with
// A_ij = a_i n_k,i n_k,j Γ_ij k_i·k_j for i > j, the chunk maps the state S before it to
//
//   E = k S,  R = b∘v − read∘E,  U = T R,  o = out∘(q S) + P U,  S ← γ_C S + kᵀ (write∘U)
//
// Without decays and norm these are the equations of docs/equations.md (the chunk algorithm), with A = diag(a) L, R =
// diag(b) V − diag(a) K S, and the scale in P. T and P are images of one tile each, in the type of the elements.
struct ChunkRecord {
  alignas(128) unsigned char t[kChunkTokens * kChunkTokens * 2];  // (I + A)⁻¹
  unsigned char p[kChunkTokens * kChunkTokens * 2];               // scale n_q,i n_k,j Γ_ij q_i·k_j for i ≥ j
  float b[kChunkTokens];                                          // write gain
  float read[kChunkTokens];                                       // a_i γ_i n_k,i
  float write[kChunkTokens];                                      // n_k,i γ_C/γ_i
  float out[kChunkTokens];                                        // scale γ_i n_q,i
  alignas(128) float decay;                                       // γ_C
  float growth[kChunkTokens / 16];  // per 16 tokens: 1 if no I − a k kᵀ of theirs has a norm above 1, else infinity
};
static_assert(sizeof(ChunkRecord) % 128 == 0);

// The decayed keys and queries of a chunk and value head where every key channel has a gate or the rule has two keys.
// γ_i is then a vector over the channels. E reads γ_i∘κ_i (`k`), where the erase key κ_i is k_i if the rule has one
// key, the state gets γ_C/γ_i∘k_i (`written`), and o reads γ_i∘q_i (`q`). A_ij has κ_i in the place of k_i, and n_k of
// the key multiplies κ too. The vectors of the record are then without γ, and γ_C is `decay`. In float16 every row is
// also multiplied by a power of two, by which its factor n_k or n_q is divided (kUnitRows in channels.cuh). k, written
// and q are images of kTiles tiles of 64 channels each, in the type of the elements.
template <int kTiles>
struct ScaledRows {
  static constexpr int kBytes = kTiles * kChunkTokens * 128;
  alignas(128) unsigned char k[kBytes], written[kBytes], q[kBytes];
  float decay[64 * kTiles];
};

// Returns the size of ScaledRows for K key channels, in bytes.
constexpr std::size_t scaled_rows_bytes(const DeltaShape& s) {
  return s.key_dim <= 64 ? sizeof(ScaledRows<1>) : sizeof(ScaledRows<2>);
}

// The matrix M of a segment, which maps the state before it to M S + N (segments.cc). M is the sum of two matrices in
// the type of the elements, which together have twice the significant bits of one. Each is an image of Mᵀ: kTiles times
// 64 rows, each of kTiles tiles.
template <int kTiles>
struct SegmentMap {
  static constexpr int kBytes = kTiles * kTiles * kChunkTokens * 128;
  alignas(128) unsigned char high[kBytes], low[kBytes];
};

// Returns the size of SegmentMap for K key channels, in bytes.
constexpr std::size_t segment_map_bytes(const DeltaShape& s) {
  return s.key_dim <= 64 ? sizeof(SegmentMap<1>) : sizeof(SegmentMap<2>);
}

// Keys of more dimensions than this are divided: each of two warpgroups has half of the keys of every state. `prepare`,
// the sweeps on Hopper and the gradients take divided keys, without segments and without ScaledRows.
inline constexpr std::int64_t kUndividedKeys = 128;
constexpr bool divides_keys(const DeltaShape& s) { return s.key_dim > kUndividedKeys; }

// The largest absolute values of 16 columns of a state: before the warm-up of a segment, in the walk of the segment
// before it, and after the warm-up. As bits, so that NaN is above infinity.
struct Peaks {
  unsigned before, after;
};

// A forward problem with its workspace. E, the type of the elements and of every factor of a product, is bfloat16 or
// float16.
template <class E>
struct ChunkProblem {
  static constexpr int kTokens = kChunkTokens;
  DeltaForward<E> p;
  ChunkRecord* records = nullptr;   // [slots][HV]
  unsigned char* scaled = nullptr;  // [slots][HV], ScaledRows, if has_decayed_rows
  // Where sequences are cut into segments (segments.cc): [N, HV · (segments − 1), K, V], at index 0 of a head the state
  // after the first segment, and at index i the matrix N of segment i, for every segment but the first and the last.
  View<float, 4> segment_states;
  unsigned char* segment_maps = nullptr;  // [N, HV, segments − 2], SegmentMap of the same segments
  int segments = 1;
  int forgetting_segments = 0;  // the segments of a head whose walks begin from zeros; 0: no walk may
  Peaks* peaks = nullptr;       // [N, HV, forgetting_segments − 1, ⌈V/16⌉]
  std::int64_t slots = 0;
  std::int64_t slots_per_sequence = 0;  // 0 if sequences are packed
  float scale = 0;
  // Whether rows can be read or written in pieces of 16 bytes.
  bool q_rows = false, k_rows = false, v_rows = false, o_rows = false, g_rows = false, erase_rows = false;
};

// Returns the number of slots. If sequences are packed it is an upper bound, because the host does not read cu_seqlens.
constexpr std::int64_t chunk_slots(const DeltaShape& s) {
  if (s.packed > 0) return s.tokens / kChunkTokens + s.packed;
  return s.batch * ((s.tokens + kChunkTokens - 1) / kChunkTokens);
}

// Returns the chunks per segment of a sequence of `chunks` chunks. The last segments may have fewer.
constexpr std::int64_t segment_chunks(std::int64_t chunks, int segments) { return (chunks + segments - 1) / segments; }

// Returns a problem, in one segment and without a workspace.
template <class E>
ChunkProblem<E> chunk_problem(const DeltaForward<E>& p);

// Returns what the kernels do not take of a problem with divided keys, or "".
std::string divided_keys_refusal(const DeltaShape& shape, const DeltaRule& rule);

// Returns the number of segments per sequence, a function of the sizes alone. 1: sequences are not cut.
int segments_of(const DeltaShape& shape);

// Returns the segments of a sequence whose walks begin from zeros where the decays allow it
// (sweep/truncation_sm90.cuh), as many as the thread blocks for the maps can walk. 0: no walk may.
int forgetting_segments_of(const DeltaShape& shape, const DeltaRule& rule);

// Launches the kernel that writes every record, for problems without ScaledRows. With `maps` (on Hopper)
// the copy engine reads keys and queries. Every launch function here throws CudaError where the launch fails.
template <class E>
void launch_prepare(const ChunkProblem<E>& problem, const RowMaps* maps, cudaStream_t stream);

// Launches the kernel that writes every record and all ScaledRows.
template <class E>
void launch_prepare_channel(const ChunkProblem<E>& problem, cudaStream_t stream);

// Launches the sweep on any GPU from sm_80 on.
template <class E>
void launch_sweep_portable(const ChunkProblem<E>& problem, cudaStream_t stream);

// Launches the sweep on a Hopper GPU. `maps` describes q, k and v, and `outputs` describes o. With `fused` the sweep
// also computes the records, so that launch_prepare is not needed.
template <class E>
void launch_sweep_sm90(const ChunkProblem<E>& problem, const RowMaps& maps, const CUtensorMap& outputs, bool fused,
                       cudaStream_t stream);

}  // namespace efla::gpu
