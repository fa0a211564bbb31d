// Everything of a chunk that does not depend on the state, for all chunks at once: one thread block per chunk and query
// head, which loops over the value heads of that head.
#include "efla/cuda/chunk.h"
#include "efla/cuda/error.h"
#include "efla/cuda/launch.h"
#include "efla/cuda/prepare.cuh"

namespace efla::gpu {
namespace {

// The matrix and the record take the place of keys and queries once those have been multiplied.
template <int kTiles>
union PrepareMemory {
  unsigned char rows[2][kTiles * kTileBytes];  // keys, queries
  ChunkRecord record;
  __device__ PrepareMemory() {}
};

// Copies a record from shared to global memory; wait_for_record says when it may be overwritten.
__device__ __forceinline__ void store_record(const ChunkRecord& record, ChunkRecord* to, int thread) {
#if __CUDA_ARCH__ >= 900
  if (thread == 0) store_bulk(to, &record, sizeof(ChunkRecord));
#else
  const auto* from = reinterpret_cast<const uint4*>(&record);
  for (int piece = thread; piece < static_cast<int>(sizeof(ChunkRecord) / 16); piece += kPrepareThreads)
    reinterpret_cast<uint4*>(to)[piece] = from[piece];
#endif
}
__device__ __forceinline__ void wait_for_record(int thread) {
#if __CUDA_ARCH__ >= 900
  if (thread == 0) store_bulk_wait();
#endif
}

// Makes what this thread wrote to shared memory visible to wgmma and bulk copies, which sm_80 does not have.
__device__ __forceinline__ void fence_record() {
#if __CUDA_ARCH__ >= 900
  fence_for_products();
#endif
}

template <int kTiles, bool kGrouped>
__global__ void __launch_bounds__(kPrepareThreads, kGrouped ? 3 : 4)
    prepare_kernel(const __grid_constant__ ChunkProblem c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& memory = *reinterpret_cast<PrepareMemory<kTiles>*>(shared);
  auto& scratch = *reinterpret_cast<PrepareScratch*>(shared + sizeof(PrepareMemory<kTiles>));
  const DeltaForward<bfloat16>& p = c.p;
  const int thread = threadIdx.x, warp = warp_of(thread), lane = thread % 32;
  const unsigned heads = static_cast<unsigned>(p.shape.heads);
  const std::int64_t slot = blockIdx.x / heads, i_q = blockIdx.x % heads, group = kGrouped ? p.shape.group() : 1;
  const ChunkAt at = chunk_at(c, slot);
  if (at.rows == 0) return;
  load_rows<kTiles, kPrepareThreads>(memory.rows[0], p.k, at.i_b, at.start, at.rows, i_q, 0, c.k_rows, thread);
  load_rows<kTiles, kPrepareThreads>(memory.rows[1], p.q, at.i_b, at.start, at.rows, i_q, 0, c.q_rows, thread);
  copy_async_commit();
  TokenPair tokens = read_tokens(p, at, i_q * group, lane);
  copy_async_wait<0>();
  fence_record();
  __syncthreads();

  BlockProducts products;
  block_products<kTiles>(shared_address(memory.rows[0]), shared_address(memory.rows[1]), warp, lane, products);
  const float squares = p.rule.qk_l2norm ? query_squares<kTiles>(shared_address(memory.rows[1]), warp, lane) : 0.0F;
  __syncthreads();
  clear_upper_blocks(memory.record, thread);
  for (std::int64_t i = 0; i < group; ++i) {
    const std::int64_t i_h = i_q * group + i;
    fill_record(products, p.rule, c.scale, tokens, squares, warp, lane, scratch, memory.record,
                [] { __syncthreads(); });
    if (kGrouped && i + 1 < group) tokens = read_tokens(p, at, i_h + 1, lane);
    fence_record();
    __syncthreads();
    store_record(memory.record, &c.records[slot * p.shape.value_heads + i_h], thread);
    wait_for_record(thread);
    if constexpr (kGrouped) __syncthreads();
  }
}

template <int kTiles, bool kGrouped>
void launch(const ChunkProblem& c, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PrepareMemory<kTiles>) + sizeof(PrepareScratch);
  const auto kernel = prepare_kernel<kTiles, kGrouped>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  kernel<<<grid_of("chunk_fwd", c.slots * c.p.shape.heads), kPrepareThreads, kBytes, stream>>>(c);
  check_launch("prepare");
}

template <int kTiles>
void launch(const ChunkProblem& c, cudaStream_t stream) {
  if (c.p.shape.group() > 1) return launch<kTiles, true>(c, stream);
  launch<kTiles, false>(c, stream);
}

}  // namespace

void launch_prepare(const ChunkProblem& c, cudaStream_t stream) {
  if (c.p.shape.key_dim <= 64) return launch<1>(c, stream);
  launch<2>(c, stream);
}

}  // namespace efla::gpu
