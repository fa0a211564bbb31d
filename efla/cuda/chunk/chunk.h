// How the chunkwise kernels cut a problem: chunks of kChunkTokens tokens of a sequence, each with a slot, and per slot
// and value head a record in the workspace that `prepare` writes and a sweep over the state reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/delta.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

inline constexpr int kChunkTokens = 64;

// What a chunk brings to the sweep besides q, k and v. With γ_i the decay from the chunk's start to token i, γ_C the
// whole chunk's, n_k and n_q the factors of the L2 norm and Γ_ij = γ_i/γ_j, the chunk maps the state S before it to
//
//   E = kᵀ S,  R = b∘v − read∘E,  U = T R,  o = out∘(qᵀ S) + P U,  S ← γ_C S + k (write∘U)
//
// T and P are images of the swizzled tile (tile.cuh) in the type of the elements.
struct ChunkRecord {
  alignas(128) unsigned char t[kChunkTokens * kChunkTokens * 2];  // (I + stril(a_i n_i n_j Γ_ij k_iᵀ k_j))⁻¹
  unsigned char p[kChunkTokens * kChunkTokens * 2];               // scale n_q,i n_k,j Γ_ij q_iᵀ k_j for i ≥ j
  float b[kChunkTokens];                                          // write gain
  float read[kChunkTokens];                                       // a_i γ_i n_k,i
  float write[kChunkTokens];                                      // n_k,i γ_C/γ_i
  float out[kChunkTokens];                                        // scale γ_i n_q,i
  alignas(128) float decay;                                       // γ_C
};
static_assert(sizeof(ChunkRecord) % 128 == 0);

// With a gate per key channel γ_i is a vector over the channels. The gates go into the keys and queries: E reads
// γ_i∘k_i, o reads γ_i∘q_i, and the state gets γ_C/γ_i∘k_i. The record's vectors then are without γ, and γ_C is here.
// Rows of float16 are multiplied by powers of two, one per key and one per query, and n_k and n_q divided by them
// (kUnitRows in channels.cuh). Images of swizzled tiles in the type of the elements, 64 channels each.
template <int kTiles>
struct ScaledRows {
  static constexpr int kBytes = kTiles * kChunkTokens * 128;
  alignas(128) unsigned char k[kBytes], written[kBytes], q[kBytes];
  float decay[64 * kTiles];
};

constexpr std::size_t scaled_rows_bytes(const DeltaShape& s) {
  return s.key_dim <= 64 ? sizeof(ScaledRows<1>) : sizeof(ScaledRows<2>);
}

// The map of a segment, S ← M S, in two parts of the elements' type. The sum of both has twice as many significant bits
// of M's elements as one part. Rows of the transposed map as images of swizzled tiles: kTiles times 64 rows of kTiles
// tiles.
template <int kTiles>
struct SegmentMap {
  static constexpr int kBytes = kTiles * kTiles * kChunkTokens * 128;
  alignas(128) unsigned char high[kBytes], low[kBytes];
};

constexpr std::size_t segment_map_bytes(const DeltaShape& s) {
  return s.key_dim <= 64 ? sizeof(SegmentMap<1>) : sizeof(SegmentMap<2>);
}

// Keys of more dimensions than this are divided: two warpgroups have half of every state each. Only `prepare`, the
// sweeps on Hopper and the gradients take them, without segments and without a gate per key channel.
inline constexpr std::int64_t kUndividedKeys = 128;
constexpr bool divides_keys(const DeltaShape& s) { return s.key_dim > kUndividedKeys; }

// E, the type of elements in memory and of what is multiplied, is bfloat16 or float16.
template <class E>
struct ChunkProblem {
  DeltaForward<E> p;
  ChunkRecord* records = nullptr;   // [slots][HV]
  unsigned char* scaled = nullptr;  // [slots][HV], ScaledRows with a gate per channel
  // Of sequences that are cut into segments of whole chunks (segments.cc), the state after the first segment and the
  // states that the others but the last would end with, had they begun with zeros [N, HV · (segments − 1), K, V], and
  // the product of a segment's chunks as a map of the state [N, HV, segments − 2], from the second segment to the last
  // but one.
  View<float, 4> segment_states;
  unsigned char* segment_maps = nullptr;
  int segments = 1;
  std::int64_t slots = 0;
  std::int64_t slots_per_sequence = 0;  // 0: packed
  float scale = 0;
  // Rows that 16-byte accesses can read or write.
  bool q_rows = false, k_rows = false, v_rows = false, o_rows = false, g_rows = false;
};

// Slots of all sequences; of packed ones an upper bound, because the host does not read cu_seqlens.
constexpr std::int64_t chunk_slots(const DeltaShape& s) {
  if (s.packed > 0) return s.tokens / kChunkTokens + s.packed;
  return s.batch * ((s.tokens + kChunkTokens - 1) / kChunkTokens);
}

// The chunks of a sequence of `chunks` chunks that each of `segments` segments has; the last ones may have fewer.
constexpr std::int64_t segment_chunks(std::int64_t chunks, int segments) { return (chunks + segments - 1) / segments; }

// The multiprocessors for which forms and splits are chosen, whatever the GPU has, so that bits do not depend on it: an
// H200's. waves_of: how often thread blocks fill them, one block each.
inline constexpr std::int64_t kMultiprocessors = 132;
constexpr std::int64_t waves_of(std::int64_t blocks) { return (blocks + kMultiprocessors - 1) / kMultiprocessors; }

template <class E>
constexpr bool has_channel_gate(const ChunkProblem<E>& c) {
  return c.p.rule.decay == Decay::channel;
}

// Returns what keeps the kernels from the divided keys of a problem, or "".
std::string divided_keys_refusal(const DeltaShape& shape, const DeltaRule& rule);

// Returns into how many segments the sequences of a problem are cut, a function of the sizes alone; 1: they are not.
int segments_of(const DeltaShape& shape);

// Launches the kernel that writes every record. With `maps` (on Hopper) it reads rows by them.
template <class E>
void launch_prepare(const ChunkProblem<E>& problem, const RowMaps* maps, cudaStream_t stream);

// The same where every key channel has a gate: also writes the scaled rows.
template <class E>
void launch_prepare_channel(const ChunkProblem<E>& problem, cudaStream_t stream);

// Launches the sweep over the state on any GPU.
template <class E>
void launch_sweep_portable(const ChunkProblem<E>& problem, cudaStream_t stream);

// Launches the sweep on a Hopper GPU, which writes outputs by the descriptor `outputs`. `fused` computes the records on
// the way, so that `prepare` is not needed.
template <class E>
void launch_sweep_sm90(const ChunkProblem<E>& problem, const RowMaps& maps, const CUtensorMap& outputs, bool fused,
                       cudaStream_t stream);

}  // namespace efla::gpu
