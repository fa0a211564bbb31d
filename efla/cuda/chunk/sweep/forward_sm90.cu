// The sweep over the state on Hopper GPUs: products by wgmma, copies by the copy engine. It computes the equations at
// ChunkRecord (chunk.h); docs/design/2026-11-cuda-forward.md explains it.
//
// One thread block per sequence, value head and 64 · kGroups value columns walks the chunks of the sequence. Its first
// kGroups warpgroups keep 64 rows each of the transposed state Sᵀ [V, K] in registers, as in forward_portable.cu. One
// thread of the other warps copies the rows of chunks to shared memory. With kFused the other warps are two warpgroups
// that also compute the records (fused_record.cuh), so that T and P do not go through memory. Otherwise one warp also
// copies the records that `prepare` wrote. If two warpgroups have states, this warp is in a third warpgroup, whose
// registers they get and whose other warps end at once.
//
// If sequences are cut into segments (segments.cc), a thread block walks one segment. Without kOutputs the thread
// blocks compute the maps of segments, starting from zeros or from the identity with values of zero. The same launch
// has thread blocks that compute the outputs of the first segment, which need no map.
//
// If keys are divided (walk_divided_keys in forward_walks_sm90.cuh), two warpgroups have half of the keys each, of the
// same 64 value columns. They send each other their parts of sums over keys.
//
// Chunk c has stage c % kStages for its rows and record c % kRecords. Barriers say that rows or a record have arrived,
// and that every warp has finished reading them.
#include <algorithm>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/chunk/sweep/forward_walks_sm90.cuh"
#include "efla/cuda/chunk/sweep/fused_record.cuh"
#include "efla/cuda/chunk/sweep/walk_sm90.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/common/wgmma.cuh"

namespace efla::gpu {
namespace {

template <int kTiles, int kGroups, bool kFused>
constexpr int threads() {
  constexpr int kOthers = kFused ? 2 * kGroupThreads : kStateGroups<kTiles, kGroups> == 2 ? kGroupThreads : 32;
  return kGroupThreads * kStateGroups<kTiles, kGroups> + kOthers;
}

// Initialises the barriers and the walk. Run by one thread.
template <int kTiles, int kGroups, bool kFused, bool kChannel>
__device__ __forceinline__ void init_shared(const Walk& walk, Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  constexpr int kUsers = kStateGroups<kTiles, kGroups> * (kFused ? kGroupThreads : kGroupWarps);
  shared.walk = walk;
  shared.rows_ring.init(1, kUsers);
  shared.record_ring.init(kFused ? kGroupThreads : 1, kUsers);
  if constexpr (kDivided<kTiles>) shared.exchange.init();
  shared.tokens_full.init(32);
  shared.vectors_full.init(kGroupThreads);
  shared.diagonal_full.init(kGroupThreads);
  shared.map_ring.init(1, kGroups * kGroupWarps);
  barrier_init(&shared.tail, 1);
  barrier_init(&shared.tail_full, 32);
  fence_async_proxy();
}

template <class E, int kTiles, int kGroups, bool kFused, bool kOutputs, bool kChannel, bool kTruncates>
__global__ void __launch_bounds__(threads<kTiles, kGroups, kFused>(), 1)
    sweep_kernel(const __grid_constant__ ChunkProblem<E> c, const __grid_constant__ RowMaps maps,
                 const __grid_constant__ CUtensorMap outputs) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kTiles, kGroups, kFused, kChannel>*>(memory);
  // The shared memory of thread blocks that compute the first segment's outputs in a launch of the maps.
  [[maybe_unused]] auto& first = *reinterpret_cast<Shared<kTiles, 1, false, kChannel>*>(memory);
  __shared__ Walk walk;
  if constexpr (!kTruncates || kOutputs) let_next_kernel_begin();
  if constexpr (kFused) wait_for_kernels();
  if (threadIdx.x == 0) walk = walk_of<kGroups, kOutputs>(c);
  if constexpr (kTruncates) {
    if (threadIdx.x < 32) {
      __syncwarp();
      truncate<kGroups, kOutputs>(c, walk, threadIdx.x);
    }
    __syncthreads();
    if (walk.chunks < 0) return;
  }
  if (threadIdx.x == 0) {
    if (!kOutputs && walk.outputs) {
      init_shared(walk, first);
    } else {
      init_shared(walk, shared);
    }
  }
  __syncthreads();
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if constexpr (!kOutputs) {
    if (walk.map) {
      for (auto& rows : shared.rows) {
        for (int at = threadIdx.x; at < static_cast<int>(sizeof(rows.v) / 16);
             at += threads<kTiles, kGroups, kFused>()) {
          reinterpret_cast<uint4*>(rows.v)[at] = uint4{};
        }
      }
      __syncthreads();
    }
  }
  if constexpr (kFused) {
    if (threadIdx.x / 32 == (kGroups + 1) * kGroupWarps) start_records(c, maps, thread % 32, shared);
    __syncthreads();
  }
  // The registers of all warpgroups together must not exceed the registers with which the block was started: 168 per
  // thread of 384 threads, or 128 per thread of 512.
  constexpr int kOwners = kStateGroups<kTiles, kGroups>;
  if (group < kOwners) {
    if constexpr (kOwners == 2) take_registers<kFused ? 192 : 232>();
    if constexpr (!kFused) wait_for_kernels();
    if constexpr (kDivided<kTiles>) {
      walk_divided_keys(c, group, thread, shared);
    } else if constexpr (kOutputs) {
      walk_outputs<kTruncates>(c, outputs, group, thread, shared);
    } else if (!walk.outputs) {
      walk_map(c, group, thread, shared);
    } else if (group == 0) {
      walk_outputs<kTruncates>(c, outputs, 0, thread, first);
    }
  } else if constexpr (!kFused) {
    if constexpr (kOwners == 2) give_registers<40>();
    if (thread >= 32) return;
    if (!kOutputs && walk.outputs) {
      copy_chunks<true, kTruncates>(c, maps, thread, first);
    } else {
      copy_chunks<kOutputs, kOutputs && kTruncates>(c, maps, thread, shared);
    }
  } else if (group == kGroups) {
    if constexpr (kGroups == 2) give_registers<64>();
    prepare_keys(c, thread, shared);
  } else {
    if constexpr (kGroups == 2) give_registers<64>();
    prepare_queries(c, maps, thread, shared);
  }
}

template <int kTiles, int kGroups, bool kFused, bool kChannel, bool kOutputs = true, bool kTruncates = false, class E>
void launch(const ChunkProblem<E>& c, const RowMaps& maps, const CUtensorMap& outputs, cudaStream_t stream) {
  constexpr int kBytes = std::max(sizeof(Shared<kTiles, kGroups, kFused, kChannel>),
                                  kOutputs ? 0 : sizeof(Shared<kTiles, 1, false, kChannel>)),
                kColumns = 64 * kGroups;
  static_assert(kBytes + sizeof(Walk) <= 227 * 1024);
  const auto kernel = sweep_kernel<E, kTiles, kGroups, kFused, kOutputs, kChannel, kTruncates>;
  const int blocks = kOutputs ? sweep_blocks(c, kColumns) : map_blocks(c, kColumns);
  const unsigned grid = grid_of("chunk_fwd", c.p.shape.sequences() * c.p.shape.value_heads * blocks);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  launch_early("sweep", kernel, grid, threads<kTiles, kGroups, kFused>(), kBytes, stream, c, maps, outputs);
}

// Launches the maps, if sequences are cut into segments, and then the sweep. With few heads a thread block has 64 value
// columns, otherwise 128.
template <int kTiles, bool kChannel, bool kTruncates = false, class E>
void launch_sweep(const ChunkProblem<E>& c, const RowMaps& maps, const CUtensorMap& outputs, cudaStream_t stream) {
  if constexpr (!kChannel && !kTruncates) {
    if (c.forgetting_segments > 0) return launch_sweep<kTiles, kChannel, true>(c, maps, outputs, stream);
  }
  if (c.segments > 1) {
    launch<kTiles, 2, false, kChannel, false, kTruncates>(c, maps, outputs, stream);
  }
  if (c.p.shape.value_dim > 64 &&
      c.p.shape.sequences() * c.p.shape.value_heads * (c.segments - (c.segments > 1 ? 1 : 0)) >= kManyHeads) {
    return launch<kTiles, 2, false, kChannel, true, kTruncates>(c, maps, outputs, stream);
  }
  launch<kTiles, 1, false, kChannel, true, kTruncates>(c, maps, outputs, stream);
}

}  // namespace

template <class E>
void launch_sweep_sm90(const ChunkProblem<E>& problem, const RowMaps& maps, const CUtensorMap& outputs, bool fused,
                       cudaStream_t stream) {
  const bool narrow = problem.p.shape.key_dim <= 64;
  if (divides_keys(problem.p.shape)) return launch<4, 1, false, false>(problem, maps, outputs, stream);
  if (fused) {
    ChunkProblem<E> c = problem;
    c.segments = 1;
    return narrow ? launch<1, 1, true, false>(c, maps, outputs, stream)
                  : launch<2, 2, true, false>(c, maps, outputs, stream);
  }
  if (has_decayed_rows(problem.p.rule)) {
    return narrow ? launch_sweep<1, true>(problem, maps, outputs, stream)
                  : launch_sweep<2, true>(problem, maps, outputs, stream);
  }
  narrow ? launch_sweep<1, false>(problem, maps, outputs, stream)
         : launch_sweep<2, false>(problem, maps, outputs, stream);
}

template void launch_sweep_sm90(const ChunkProblem<bfloat16>&, const RowMaps&, const CUtensorMap&, bool, cudaStream_t);
template void launch_sweep_sm90(const ChunkProblem<float16>&, const RowMaps&, const CUtensorMap&, bool, cudaStream_t);

}  // namespace efla::gpu
