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

// Where a query head has one value head, the products need no registers once they are written.
template <int kTiles, bool kGrouped>
__global__ void __launch_bounds__(kPrepareThreads, kGrouped ? 2 : 4)
    prepare_kernel(const __grid_constant__ ChunkProblem c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& memory = *reinterpret_cast<PrepareMemory<kTiles>*>(shared);
  auto& scratch = *reinterpret_cast<PrepareScratch*>(shared + sizeof(PrepareMemory<kTiles>));
  const DeltaForward<bfloat16>& p = c.p;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const std::int64_t slot = blockIdx.x / p.shape.heads, i_q = blockIdx.x % p.shape.heads, group = p.shape.group();
  const ChunkAt at = chunk_at(c, slot);
  if (at.rows == 0) return;
  load_rows<kTiles, kPrepareThreads>(memory.rows[0], p.k, at.i_b, at.start, at.rows, i_q, 0, c.k_rows, thread);
  load_rows<kTiles, kPrepareThreads>(memory.rows[1], p.q, at.i_b, at.start, at.rows, i_q, 0, c.q_rows, thread);
  copy_async_commit();
  TokenPair tokens = read_tokens(p, at, i_q * group, lane);
  copy_async_wait<0>();
  __syncthreads();

  BlockProducts products;
  block_products<kTiles>(shared_address(memory.rows[0]), shared_address(memory.rows[1]), p.rule.qk_l2norm, warp, lane,
                         products, scratch);
  __syncthreads();
  clear_upper_blocks(memory.record, thread);
  for (std::int64_t i = 0; i < (kGrouped ? group : 1); ++i) {
    const std::int64_t i_h = i_q * group + i;
    fill_record(products, p.rule, c.scale, tokens, thread, scratch, memory.record, [] { __syncthreads(); });
    if (kGrouped && i + 1 < group) tokens = read_tokens(p, at, i_h + 1, lane);
    __syncthreads();
    auto* to = reinterpret_cast<uint4*>(&c.records[slot * p.shape.value_heads + i_h]);
    const auto* from = reinterpret_cast<const uint4*>(&memory.record);
    for (int piece = thread; piece < static_cast<int>(sizeof(ChunkRecord) / 16); piece += kPrepareThreads)
      to[piece] = from[piece];
    __syncthreads();
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
