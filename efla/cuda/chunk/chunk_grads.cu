// The gradients of the inputs of the chunkwise form from the states, writes and their gradients of every chunk, for all
// chunks at once: one thread block per chunk and query head, which loops over the value heads of that head.
//
// In the notation of ChunkBackward, per token with k̂ = n_k k, q̂ = n_q q, ŝ_i = γ_C/γ_i and sums over value columns:
//
//   W_ij = scale Γ_ij dO_i·U_j  for i ≥ j,    H_ij = Γ_ij D_i·U_j  for i > j
//   dq̂ = scale γ∘(dO Sᵀ) + W k̂,    X = γ∘(D Sᵀ) + H k̂,    dk̂ = ŝ∘(U dS'ᵀ) + Wᵀ q̂ − (a∘H)ᵀ k̂ − a∘X
//   dv = b∘D,    db_i = v_i·D_i,    da_i = −k̂_i·X_i
//
// The gradient of a gate g_t is the sum of all terms of the loss whose decay spans token t: with M_ij = W_ij q̂_i·k̂_j −
// a_i H_ij k̂_i·k̂_j, r_i the terms of token i that read S, w_j those of token j's write that S' has, and z = γ_C S·dS',
//
//   dg_t = z + Σ_{i≥t} r_i + Σ_{j<t} w_j + Σ_{i≥t>j} M_ij
//
// Products are of tiles of elements summed in float32 by eight warps, or by sixteen for more than 128 keys: warp w has
// the 16 rows from 16 (w % 4) on, and of the keys part w / 4; of the 64 × 64 matrices the warps of the first part have
// W and the warps of the second one H, below the diagonal. Sixteen warps have the multiprocessor to themselves, so they
// copy the next slice of value columns while they compute with one.
#include "efla/cuda/chunk/chunk_grads_portable.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"

namespace efla::gpu {
namespace {

template <class E, int kTiles, bool kGrouped>
__global__ void __launch_bounds__(128 * kKeyParts<kTiles>, kGrouped || kTiles == 4 ? 1 : 2)
    grads_kernel(const __grid_constant__ ChunkBackward<E> c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int heads = static_cast<int>(c.p.shape.heads), slot = static_cast<int>(blockIdx.x) / heads,
            i_q = static_cast<int>(blockIdx.x) % heads;
  const ChunkAt at = chunk_at(c.forward, slot);
  if (at.rows > 0)
    PortableGrads<E, kTiles, kGrouped>(c, *reinterpret_cast<PortableMemory<kTiles>*>(shared), at, slot, i_q).run();
}

template <int kTiles, bool kGrouped, class E>
void launch(const ChunkBackward<E>& c, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PortableMemory<kTiles>);
  static_assert(kBytes <= (kTiles == 4 ? 227 : 99) * 1024);
  const auto kernel = grads_kernel<E, kTiles, kGrouped>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  kernel<<<grid_of("chunk_bwd", c.forward.slots * c.p.shape.heads), 128 * kKeyParts<kTiles>, kBytes, stream>>>(c);
  check_launch("chunk_bwd, grads");
}

template <int kTiles, class E>
void launch(const ChunkBackward<E>& c, cudaStream_t stream) {
  if (c.p.shape.group() > 1) return launch<kTiles, true>(c, stream);
  launch<kTiles, false>(c, stream);
}

}  // namespace

template <class E>
void launch_grads(const ChunkBackward<E>& c, cudaStream_t stream) {
  if (divides_keys(c.p.shape)) return launch<4>(c, stream);
  if (c.p.shape.key_dim <= 64) return launch<1>(c, stream);
  launch<2>(c, stream);
}

template void launch_grads(const ChunkBackward<bfloat16>&, cudaStream_t);
template void launch_grads(const ChunkBackward<float16>&, cudaStream_t);

}  // namespace efla::gpu
