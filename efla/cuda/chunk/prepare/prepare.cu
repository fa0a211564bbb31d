// `prepare`: computes the record (ChunkRecord in chunk.h) of every chunk and value head, that is everything of the
// chunk algorithm that does not depend on the state. One thread block of four warps per chunk and query head computes K
// Kᵀ and Q Kᵀ once, and then loops over the value heads of the query head. prepare.cuh has the work of the warps;
// docs/equations.md has the equations, docs/design/2026-11-cuda-forward.md the choices.
#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/chunk/prepare/prepare.cuh"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/tensor_map.h"

namespace efla::gpu {
namespace {

// Keys and queries, and later in their place the record, the scratch and products. With kGrouped (several value heads
// per query head) the threads keep Q Kᵀ in `queries`, because registers do not hold both products over all heads.
template <int kTiles, bool kGrouped>
union PrepareMemory {
  unsigned char rows[2][kTiles * kTileBytes];  // keys, queries
  struct {
    ChunkRecord record;
    PrepareScratch scratch;
    float4 queries[kGrouped ? 8 : 1][kPrepareThreads];
  } products;
  __device__ PrepareMemory() {}
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kCopyEngine = true;
#else
constexpr bool kCopyEngine = false;
#endif

// Starts the copies of a chunk's keys and queries. With kMapped the copy engine makes them.
template <int kTiles, bool kMapped, class E>
__device__ __forceinline__ void start_rows(const ChunkProblem<E>& c, const RowMaps& maps, const ChunkAt& at,
                                           std::int64_t i_q, int thread, unsigned char (&rows)[2][kTiles * kTileBytes],
                                           std::uint64_t* loaded) {
  if constexpr (!kMapped || !kCopyEngine) {
    load_rows<kTiles, kPrepareThreads>(rows[0], c.p.k, at.i_b, at.start, at.rows, i_q, 0, c.k_rows, thread);
    load_rows<kTiles, kPrepareThreads>(rows[1], c.p.q, at.i_b, at.start, at.rows, i_q, 0, c.q_rows, thread);
    copy_async_commit();
  } else {
    if (thread == 0) {
      barrier_init(loaded, 1);
      fence_async_proxy();
      barrier_expect(loaded, 2 * kTiles * kTileBytes);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        for (int i = 0; i < 2; ++i) {
          load_tile(rows[i] + tile * kTileBytes, i == 0 ? &maps.k : &maps.q, 64 * tile, static_cast<int>(i_q),
                    static_cast<int>(at.start), static_cast<int>(at.i_b), loaded);
        }
      }
    }
    __syncthreads();
  }
}

// Waits for the copies that start_rows started. Rows after the sequence's end become zeros.
template <int kTiles, bool kMapped>
__device__ __forceinline__ void wait_for_rows(const ChunkAt& at, int thread,
                                              unsigned char (&rows)[2][kTiles * kTileBytes], std::uint64_t* loaded) {
  if constexpr (kMapped && kCopyEngine) {
    barrier_wait(loaded, 0);
    if (at.rows == kChunkTokens) return;
    for (int tile = 0; tile < kTiles; ++tile) {
      for (auto& matrix : rows) clear_rows(matrix + tile * kTileBytes, at.rows, thread, kPrepareThreads);
    }
  } else {
    copy_async_wait<0>();
  }
  fence_record();
  __syncthreads();
}

template <class E, int kTiles, bool kGrouped, bool kMapped>
__global__ void __launch_bounds__(kPrepareThreads, kTiles == 1 && kCopyEngine && !kGrouped ? 5
                                                   : kTiles == 4                           ? 3
                                                                                           : 4)
    prepare_kernel(const __grid_constant__ ChunkProblem<E> c, const __grid_constant__ RowMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& memory = *reinterpret_cast<PrepareMemory<kTiles, kGrouped>*>(shared);
  ChunkRecord& record = memory.products.record;
  PrepareScratch& scratch = memory.products.scratch;
  auto& query_products = memory.products.queries;
  const DeltaForward<E>& p = c.p;
  const int thread = threadIdx.x, warp = warp_of(thread), lane = thread % 32;
  const unsigned heads = static_cast<unsigned>(p.shape.heads);
  const std::int64_t slot = blockIdx.x / heads, i_q = blockIdx.x % heads, group = kGrouped ? p.shape.group() : 1;
  const ChunkAt at = chunk_at(c, slot);
#if __CUDA_ARCH__ >= 900
  let_next_kernel_begin();
#endif
  if (at.rows == 0) return;
  __shared__ std::uint64_t loaded;
  start_rows<kTiles, kMapped>(c, maps, at, i_q, thread, memory.rows, &loaded);
  const auto tokens_of = [&](std::int64_t i_h) {
    return read_tokens(p, p.beta.at(at.i_b, at.start, i_h), p.g ? p.g.at(at.i_b, at.start, i_h) : nullptr, 0, at.rows,
                       lane);
  };
  TokenPair<E> tokens = tokens_of(i_q * group);
  wait_for_rows<kTiles, kMapped>(at, thread, memory.rows, &loaded);

  BlockProducts keys, queries;
  const std::uint32_t k_tile = shared_address(memory.rows[0]), q_tile = shared_address(memory.rows[1]);
  leave_undefined(keys);
  leave_undefined(queries);
  start_products<E, kTiles>(k_tile, k_tile, warp, lane, keys);
  start_products<E, kTiles>(q_tile, k_tile, warp, lane, queries);
  const float squares = p.rule.qk_l2norm ? query_squares<E, kTiles>(q_tile, warp, lane) : 0.0F;
  finish_products(keys);
  finish_products(queries);
  __syncthreads();
  if constexpr (kGrouped) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      query_products[i][thread] = *reinterpret_cast<const float4*>(queries + 4 * i);
    }
  }
  clear_upper_blocks(record, thread);
  const bool gated = p.rule.decay == Decay::scalar;
  for (std::int64_t i = 0; i < group; ++i) {
    const std::int64_t i_h = i_q * group + i;
    const Token token = token_of(tokens, gated, warp, lane);
    if (kGrouped && i + 1 < group) tokens = tokens_of(i_h + 1);
    key_vectors(p.rule, token, key_squares(keys, warp, lane), warp, lane, scratch, record);
    query_vectors(p.rule, c.scale, token, squares, warp, lane, scratch, record);
    __syncthreads();
    write_keys<E>(keys, warp, lane, scratch);
    __syncwarp();
    invert_diagonal(warp, lane, scratch);
    __syncthreads();
    invert_below<E>(warp, lane, scratch, record);
    const auto blocks_of = [&](int b, float(&blocks)[16]) {
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        const auto* from = reinterpret_cast<const float4*>(queries + 8 * b + j);
        *reinterpret_cast<float4*>(blocks + j) = kGrouped ? query_products[2 * b + j / 4][thread] : *from;
      }
    };
    write_queries<E>(blocks_of, warp, lane, scratch, record);
    fence_record();
    __syncthreads();
    store_record<kPrepareThreads>(record, &c.records[slot * p.shape.value_heads + i_h], thread);
    wait_for_record(thread);
    if constexpr (kGrouped) __syncthreads();
  }
}

template <int kTiles, bool kGrouped, bool kMapped, class E>
void launch(const ChunkProblem<E>& c, const RowMaps& maps, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PrepareMemory<kTiles, kGrouped>);
  const auto kernel = prepare_kernel<E, kTiles, kGrouped, kMapped>;
  launch_kernel("prepare", kernel, grid_of("chunk_fwd", c.slots * c.p.shape.heads), kPrepareThreads, kBytes, stream, c,
                maps);
}

template <int kTiles, bool kMapped, class E>
void launch(const ChunkProblem<E>& c, const RowMaps& maps, cudaStream_t stream) {
  if (c.p.shape.group() > 1) return launch<kTiles, true, kMapped>(c, maps, stream);
  launch<kTiles, false, kMapped>(c, maps, stream);
}

}  // namespace

template <class E>
void launch_prepare(const ChunkProblem<E>& c, const RowMaps* maps, cudaStream_t stream) {
  const bool narrow = c.p.shape.key_dim <= 64;
  if (divides_keys(c.p.shape)) return launch<4, true>(c, *maps, stream);
  if (maps) return narrow ? launch<1, true>(c, *maps, stream) : launch<2, true>(c, *maps, stream);
  if (narrow) return launch<1, false>(c, {}, stream);
  launch<2, false>(c, {}, stream);
}

template void launch_prepare(const ChunkProblem<bfloat16>&, const RowMaps*, cudaStream_t);
template void launch_prepare(const ChunkProblem<float16>&, const RowMaps*, cudaStream_t);

}  // namespace efla::gpu
