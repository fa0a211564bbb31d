// How the backward by chunks divides a problem: as the forward does (chunk.h, which defines the words), plus what its
// kernels exchange through the workspace. docs/design/2026-11-cuda-backward.md explains the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/tensor_map.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

// A backward problem with its workspace. In the notation of ChunkRecord, let dO be the gradient of o, dS' the gradient
// of the state after the chunk, and D the gradient of the residual R. Row i of D is also the gradient of what token i
// writes in the recurrence.
//
//   dU = write∘(k dS') + Pᵀ dO,   D = Tᵀ dU,   dS = γ_C dS' + (out∘q)ᵀ dO − (read∘k)ᵀ D
//
// With ScaledRows, k in dU is γ_C/γ∘k (`written`), and q and k in dS are γ∘q and γ∘κ (`q` and `k`). S, dS', U and D are
// images in the type of the elements. The images of S and dS' are transposed: value columns by keys, K/64 tiles.
template <class E>
struct ChunkBackward {
  DeltaBackward<E> p;
  ChunkProblem<E> forward;                                 // the same inputs, with records
  unsigned char *states = nullptr, *dstates = nullptr;     // S before the chunk and dS' [slots][HV][slices]
  unsigned char *writes = nullptr, *dresiduals = nullptr;  // U and D [slots][HV][slices], tokens by value columns
  // The sums of the gradients of q and of k over the value heads of a query head, [slots][H][2], with two keys also of
  // κ, [slots][H][3], tokens by keys in an order that the kernel chooses. Used where a query head has several value
  // heads and the kernels read ScaledRows or the keys are divided.
  float* key_sums = nullptr;
  // On Hopper the gradients begin while the sweeps run. ready [slots][HV] counts the slices of S and of dS' that are
  // written, both together. begun counts the pairs of a chunk and a query head that thread blocks of the gradients have
  // taken.
  unsigned *ready = nullptr, *begun = nullptr;
  unsigned* claims = nullptr;  // [kClaims], by which blocks take walks (claim_walk, backward_sm90.cu)
  bool counted = false;        // whether the sweeps count in `ready`
  int slices = 0;
  bool v_rows = false, dout_rows = false, dq_rows = false, dk_rows = false;  // as in ChunkProblem; v_rows: of v and dv
};

// The words of `claims`: the number of claimed walks, then one word per pair of multiprocessors.
inline constexpr int kClaims = 1 + 128;

// Returns the index of a slice's image in `writes` and `dresiduals`. Times the tiles per state it is the index of the
// slice's first tile in `states` and `dstates`.
template <class E>
constexpr std::int64_t slice_index(const ChunkBackward<E>& c, std::int64_t slot, std::int64_t i_h, std::int64_t slice) {
  return (slot * c.p.shape.value_heads + i_h) * c.slices + slice;
}

// Launch the portable kernels, in this order after `prepare`: the forward sweep, which starts at every saved state and
// writes S and U; the reverse sweep, which writes dS', D and dinitial_state; and the products that give the gradients
// of the inputs. Every launch function here throws CudaError where a launch fails.
template <class E>
void launch_sweep_states(const ChunkBackward<E>& problem, cudaStream_t stream);
template <class E>
void launch_sweep_reverse(const ChunkBackward<E>& problem, cudaStream_t stream);
template <class E>
void launch_grads(const ChunkBackward<E>& problem, cudaStream_t stream);

// Launches the gradients of the inputs for problems with ScaledRows, on a Hopper GPU.
template <class E>
void launch_grads_channel(const ChunkBackward<E>& problem, cudaStream_t stream);

// Launches both sweeps on a Hopper GPU. `maps` describes q, k and v, and `dout` describes dO.
template <class E>
void launch_sweeps_sm90(const ChunkBackward<E>& problem, const RowMaps& maps, const CUtensorMap& dout,
                        cudaStream_t stream);

// Returns whether launch_grads_sm90 takes the problem: at most 128 keys and 128 value columns, and rows of dq and dk
// that can be written in pieces of 16 bytes.
template <class E>
bool grads_sm90_take(const ChunkBackward<E>& problem);

// Launches the gradients of the inputs on a Hopper GPU, without ScaledRows. Arguments as for both sweeps.
template <class E>
void launch_grads_sm90(const ChunkBackward<E>& problem, const RowMaps& maps, const CUtensorMap& dout,
                       cudaStream_t stream);

}  // namespace efla::gpu
