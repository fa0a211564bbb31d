// The gradients of the inputs by chunks, on any GPU from sm_80 on, without a gate per key channel, K ≤ 128; on Hopper
// GPUs also K ≤ 256. S, dS', U and D of every chunk (ChunkBackward in chunk_bwd.h) give them for all chunks at once.
// One thread block per chunk and query head loops over the value heads of the query head.
// docs/design/2026-11-cuda-backward.md explains the kernels.
//
// Notation of ChunkBackward. Per token k̂ = n_k k, q̂ = n_q q and ŝ_i = γ_C/γ_i, and · sums over value columns or keys:
//
//   W_ij = scale Γ_ij dO_i·U_j  for i ≥ j,    H_ij = Γ_ij D_i·U_j  for i > j
//   dq̂ = scale γ∘(dO Sᵀ) + W k̂,    X = γ∘(D Sᵀ) + H k̂,    dk̂ = ŝ∘(U dS'ᵀ) + Wᵀ q̂ − (a∘H)ᵀ k̂ − a∘X
//   dv = b∘D,    db_i = v_i·D_i,    da_i = −k̂_i·X_i
//
// The gradient of the gate g_t is the sum of all terms of the loss whose decay contains the decay of token t. Let r_i
// be the terms in which token i reads S, w_j the terms in which S' has the write of token j, and z = γ_C S·dS':
//
//   M_ij = W_ij q̂_i·k̂_j − a_i H_ij k̂_i·k̂_j
//   dg_t = z + Σ_{i≥t} r_i + Σ_{j<t} w_j + Σ_{i≥t>j} M_ij
//
// Eight warps multiply, or sixteen for more than 128 keys. Warp w has rows 16 (w % 4) to 16 (w % 4) + 15 and part w / 4
// of the keys. Of the 64 × 64 matrices the warps of part 0 compute W, and the warps of part 1 compute H. With sixteen
// warps a multiprocessor has one thread block, which copies the next slice of value columns while it computes one.
#include "efla/cuda/chunk/grads/grads_portable.cuh"
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
  launch_kernel("chunk_bwd, grads", kernel, grid_of("chunk_bwd", c.forward.slots * c.p.shape.heads),
                128 * kKeyParts<kTiles>, kBytes, stream, c);
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
