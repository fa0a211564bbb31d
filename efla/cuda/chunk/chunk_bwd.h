// How the chunkwise backward cuts a problem: as the forward does (chunk.h), with what its three kernels hand over per
// slot, value head and slice of 64 value columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/tensor_map.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

// In the notation of ChunkRecord, with dO the gradient of o, dS' the one of the state after the chunk, and D the
// gradient of the residual R, of which D_i is also the gradient of the token's own correction of the state:
//
//   dU = write∘(k dS') + Pᵀ dO,   D = Tᵀ dU,   dS = γ_C dS' + (out∘q)ᵀ dO − (read∘k)ᵀ D
//
// With a gate per key channel k of dU is γ_C/γ∘k, and q and k of dS are γ∘q and γ∘k (ScaledRows).
// Images of swizzled tiles (tile.cuh) in the type of the elements; of the states the transposed, value columns by keys.
template <class E>
struct ChunkBackward {
  DeltaBackward<E> p;
  ChunkProblem<E> forward;                                 // the same inputs, with records
  unsigned char *states = nullptr, *dstates = nullptr;     // S before the chunk and dS' [slots][HV][slices], K/64 tiles
  unsigned char *writes = nullptr, *dresiduals = nullptr;  // U and D [slots][HV][slices], tokens by value columns
  // With several value heads per query head, and with a gate per key channel or divided keys, the sums of the gradients
  // of q and k over value heads [slots][H][2], tokens by keys in the order of the kernel.
  float* key_sums = nullptr;
  // On Hopper, where the gradients begin while the sweeps run: how many slices of the states and of their gradients a
  // slot and head has [slots][HV], and how many chunks and query heads have been begun.
  unsigned *ready = nullptr, *begun = nullptr;
  unsigned* claims = nullptr;  // [kClaims], of the walks in reverse (claim_walk)
  bool counted = false;        // the sweeps count
  int slices = 0;
  bool v_rows = false, dout_rows = false, dq_rows = false, dk_rows = false;  // as in ChunkProblem; v and dv together
};

// How many walks have been claimed, and one word per pair of multiprocessors.
inline constexpr int kClaims = 1 + 128;

// The index of a slot's slice in `writes` and `dresiduals`, and of its first tile in the others after a product with
// the tiles per state.
template <class E>
constexpr std::int64_t slice_index(const ChunkBackward<E>& c, std::int64_t slot, std::int64_t i_h, std::int64_t slice) {
  return (slot * c.p.shape.value_heads + i_h) * c.slices + slice;
}

// Launch the kernels, in this order after `prepare`: the forward sweep that writes S and U from the saved states on,
// the reverse sweep that writes dS' and D, and the products that give the gradients of the inputs.
template <class E>
void launch_sweep_states(const ChunkBackward<E>& problem, cudaStream_t stream);
template <class E>
void launch_sweep_reverse(const ChunkBackward<E>& problem, cudaStream_t stream);
template <class E>
void launch_grads(const ChunkBackward<E>& problem, cudaStream_t stream);

// Takes the place of launch_grads where every key channel has a gate.
template <class E>
void launch_grads_channel(const ChunkBackward<E>& problem, cudaStream_t stream);

// Launches both sweeps on a Hopper GPU; `dout` describes the rows of dO.
template <class E>
void launch_sweeps_sm90(const ChunkBackward<E>& problem, const RowMaps& maps, const CUtensorMap& dout,
                        cudaStream_t stream);

// Whether launch_grads_sm90, which takes the place of launch_grads on a Hopper GPU, takes the problem.
template <class E>
bool grads_sm90_take(const ChunkBackward<E>& problem);
template <class E>
void launch_grads_sm90(const ChunkBackward<E>& problem, const RowMaps& maps, const CUtensorMap& dout,
                       cudaStream_t stream);

}  // namespace efla::gpu
