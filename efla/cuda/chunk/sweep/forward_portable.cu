// The sweep over the state on any GPU from sm_80 on: products by mma.sync, copies by cp.async. It computes the
// equations at ChunkRecord (chunk.h); docs/design/2026-11-cuda-forward.md explains it.
//
// One thread block per sequence, value head and slice of 64 value columns walks the chunks of the sequence. Each of its
// four warps keeps 16 rows of the transposed state Sᵀ [V, K] in registers, as accumulators of mma. Rounded to the type
// of the elements, the accumulators are the first operand of the next product, so neither S nor R nor U leaves the
// registers. All matrices below are the transposed of those at ChunkRecord: rows are value columns, and columns are
// tokens.
#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/chunk/products.cuh"
#include "efla/cuda/chunk/state.cuh"
#include "efla/cuda/chunk/sweep/stage_portable.cuh"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {
namespace {

// Computes one chunk: updates the state s, and replaces the values in the stage by the outputs o.
template <class E, int kTiles, bool kChannel>
__device__ __forceinline__ void sweep_chunk(float (&s)[32 * kTiles], Stage<kTiles, true, kChannel>& stage, int warp,
                                            int lane) {
  const ChunkRecord& record = stage.record;
  std::uint32_t u[4][4], written[4][4];  // U and write∘U
  {
    float e[32] = {}, sum[32] = {};
    multiply_state<E, kTiles>(e, s, shared_address(stage.k), lane);
    residual<E>(written, e, shared_address(stage.v), record, warp, lane);
    multiply_rows<E>(sum, written, shared_address(record.t), lane);
    to_operands<E>(u, sum);
    scale_columns(sum, record.write, lane);
    to_operands<E>(written, sum);
  }
  float o[32] = {};
  multiply_state<E, kTiles>(o, s, shared_address(stage.q), lane);
  scale_columns(o, record.out, lane);
  multiply_rows<E>(o, u, shared_address(record.p), lane);
  __syncwarp();  // the warp's own columns of v have been read
  write_outputs<E>(o, stage.v, warp, lane);
  decay_state(s, stage, lane);
  multiply_columns<E, 4 * kTiles>(s, written, shared_address(stage.written()), lane);
}

// Copies the outputs of a chunk from a tile to global memory.
template <class E>
__device__ __forceinline__ void store_outputs(const ChunkProblem<E>& c, const ChunkAt& at, std::int64_t i_h,
                                              std::int64_t column, const unsigned char* tile) {
  const View<E, 4>& o = c.p.o;
  const int piece = threadIdx.x % 8, count = static_cast<int>(min(o.extent[3] - column - 8 * piece, std::int64_t{8}));
  for (int row = threadIdx.x / 8; row < at.rows; row += kSweepThreads / 8) {
    const uint4 values = *reinterpret_cast<const uint4*>(tile + piece_offset(row, piece));
    if (count <= 0) continue;
    store_row_piece(o.at(at.i_b, at.start + row, i_h, column + 8 * piece), o.stride[3], values, count, c.o_rows);
  }
}

// Walks all chunks of a sequence. With two stages the next chunk is copied while one is computed.
template <class E, int kTiles, int kStages, bool kChannel>
__global__ void __launch_bounds__(kSweepThreads, 1)
    sweep_kernel(const __grid_constant__ ChunkProblem<E> c, int slices) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* stages = reinterpret_cast<Stage<kTiles, true, kChannel>*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x % slices) * 64;
  const std::int64_t i_h = blockIdx.x / slices % c.p.shape.value_heads, n = blockIdx.x / slices / c.p.shape.value_heads;
  const Sequence sequence = sequence_of(c.p, n);
  const std::int64_t slot = first_slot(c, n),
                     chunks = (sequence.end - sequence.begin + kChunkTokens - 1) / kChunkTokens;
  const auto place = [&](std::int64_t chunk) { return place_of<kChunkTokens, true>(sequence, n, chunk); };

  float s[32 * kTiles];
  read_state<kTiles>(s, c.p.initial_state, n, i_h, column + 16 * warp, lane);
  if (kStages > 1 && chunks > 0) start_loads(c, c.p, c.p.v, c.v_rows, place(0), slot, i_h, column, stages[0]);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    Stage<kTiles, true, kChannel>& stage = stages[chunk % kStages];
    if constexpr (kStages > 1) {
      if (chunk + 1 < chunks) {
        start_loads(c, c.p, c.p.v, c.v_rows, place(chunk + 1), slot + chunk + 1, i_h, column,
                    stages[(chunk + 1) % kStages]);
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
    } else {
      start_loads(c, c.p, c.p.v, c.v_rows, place(chunk), slot + chunk, i_h, column, stage);
      copy_async_wait<0>();
    }
    __syncthreads();
    save_state<kTiles>(s, c.p, sequence.i_b, i_h, static_cast<int>(sequence.first_chunk), static_cast<int>(chunk),
                       column + 16 * warp, lane);
    sweep_chunk<E>(s, stage, warp, lane);
    __syncthreads();
    store_outputs(c, place(chunk), i_h, column, stage.v);
    __syncthreads();
  }
  write_state<kTiles>(s, c.p.final_state, n, i_h, column + 16 * warp, lane);
}

template <int kTiles, int kStages, bool kChannel, class E>
void launch(const ChunkProblem<E>& c, cudaStream_t stream) {
  constexpr int kBytes = kStages * sizeof(Stage<kTiles, true, kChannel>);
  const auto kernel = sweep_kernel<E, kTiles, kStages, kChannel>;
  const std::int64_t slices = (c.p.shape.value_dim + 63) / 64;
  const unsigned grid = grid_of("chunk_fwd", c.p.shape.sequences() * c.p.shape.value_heads * slices);
  launch_kernel("sweep", kernel, grid, kSweepThreads, kBytes, stream, c, static_cast<int>(slices));
}

}  // namespace

template <class E>
void launch_sweep_portable(const ChunkProblem<E>& c, cudaStream_t stream) {
  // Two stages if they fit into 99 KB of shared memory, which every GPU from sm_80 on has per thread block.
  const bool narrow = c.p.shape.key_dim <= 64;
  if (has_decayed_rows(c.p.rule)) return narrow ? launch<1, 1, true>(c, stream) : launch<2, 1, true>(c, stream);
  narrow ? launch<1, 2, false>(c, stream) : launch<2, 1, false>(c, stream);
}

template void launch_sweep_portable(const ChunkProblem<bfloat16>&, cudaStream_t);
template void launch_sweep_portable(const ChunkProblem<float16>&, cudaStream_t);

}  // namespace efla::gpu
