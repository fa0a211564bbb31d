// The two sweeps of the backward by chunks on any GPU from sm_80 on, with products by mma.sync. They compute the
// equations at ChunkBackward (chunk_bwd.h); docs/design/2026-11-cuda-backward.md explains them.
//
// The forward sweep starts at every saved state and writes S and U of every chunk. The reverse sweep walks whole
// sequences from the last chunk to the first and writes dS' and D. As in forward_portable.cu, a thread block has a
// slice of 64 value columns, and each of its four warps keeps 16 rows of the transposed state in registers.
#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/chunk/products.cuh"
#include "efla/cuda/chunk/state.cuh"
#include "efla/cuda/chunk/sweep/stage_portable.cuh"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/saved_state.cuh"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {
namespace {

// Writes a warp's 16 rows of a transposed state to the image of its tiles.
template <class E, int kTiles>
__device__ __forceinline__ void write_state_tiles(const float (&s)[32 * kTiles], unsigned char* tiles, int warp,
                                                  int lane) {
  const int row = 16 * warp + lane / 4;
  unsigned char* to = tiles + row * 128 + lane % 4 * 4;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const int offset = opaque((piece ^ (row & 7)) << 4);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float* from = s + 32 * tile + 4 * piece;
      *reinterpret_cast<std::uint32_t*>(to + offset + tile * kTileBytes) = pack<E>(from[0], from[1]);
      *reinterpret_cast<std::uint32_t*>(to + offset + tile * kTileBytes + 8 * 128) = pack<E>(from[2], from[3]);
    }
  }
}

// Copies a tile from shared memory to its image in the workspace.
__device__ __forceinline__ void copy_tile(unsigned char* to, const unsigned char* from) {
#pragma unroll
  for (int i = 0; i < kTileBytes / 16 / kSweepThreads; ++i) {
    const int byte = 16 * (threadIdx.x + i * kSweepThreads);
    *reinterpret_cast<uint4*>(to + byte) = *reinterpret_cast<const uint4*>(from + byte);
  }
}

// Computes one chunk of the forward sweep: writes S, replaces v in the stage by U, and updates the state s.
template <class E, int kTiles, bool kChannel>
__device__ __forceinline__ void sweep_chunk(float (&s)[32 * kTiles], Stage<kTiles, false, kChannel>& stage,
                                            unsigned char* states, int warp, int lane) {
  const ChunkRecord& record = stage.record;
  std::uint32_t written[4][4];
  write_state_tiles<E, kTiles>(s, states, warp, lane);
  {
    float e[32] = {};
    multiply_state<E, kTiles>(e, s, shared_address(stage.k), lane);
    residual<E>(written, e, shared_address(stage.v), record, warp, lane);
  }
  float u[32] = {};
  multiply_rows<E>(u, written, shared_address(record.t), lane);
  __syncwarp();  // the warp's own columns of v have been read
  write_outputs<E>(u, stage.v, warp, lane);
  scale_columns(u, record.write, lane);
  to_operands<E>(written, u);
  decay_state(s, stage, lane);
  multiply_columns<E, 4 * kTiles>(s, written, shared_address(stage.written()), lane);
}

// Computes one chunk of the reverse sweep: writes dS', replaces dO in the stage by D, and updates the gradient ds.
template <class E, int kTiles, bool kChannel>
__device__ __forceinline__ void sweep_chunk(float (&ds)[32 * kTiles], Stage<kTiles, true, kChannel>& stage,
                                            unsigned char* dstates, int warp, int lane) {
  const ChunkRecord& record = stage.record;
  write_state_tiles<E, kTiles>(ds, dstates, warp, lane);
  std::uint32_t operand[4][4];
  float du[32] = {};
  multiply_state<E, kTiles>(du, ds, shared_address(stage.written()), lane);
  scale_columns(du, record.write, lane);
  column_operands(operand, shared_address(stage.v), warp, lane);
  multiply_columns<E, 4>(du, operand, shared_address(record.p), lane);
  scale_operands<E>(operand, record.out, lane);
  decay_state(ds, stage, lane);
  multiply_columns<E, 4 * kTiles>(ds, operand, shared_address(stage.q), lane);
  to_operands<E>(operand, du);
  float d[32] = {};
  multiply_columns<E, 4>(d, operand, shared_address(record.t), lane);
  __syncwarp();  // the warp's own columns of dO have been read
  write_outputs<E>(d, stage.v, warp, lane);
  scale_columns(d, record.read, lane);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[step][i] = pack<E>(-d[8 * step + 2 * i], -d[8 * step + 2 * i + 1]);
  }
  multiply_columns<E, 4 * kTiles>(ds, operand, shared_address(stage.k), lane);
}

// Walks `chunks` chunks, whose slots begin with `slot`; in reverse from the last to the first. With two stages the next
// chunk is copied while one is computed. place(i) returns the ChunkAt of chunk i.
template <int kTiles, int kStages, bool kReverse, bool kChannel, class Place, class E>
__device__ __forceinline__ void walk(const ChunkBackward<E>& c, float (&s)[32 * kTiles], std::int64_t slot,
                                     std::int64_t chunks, std::int64_t i_h, std::int64_t slice, Place&& place) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* stages = reinterpret_cast<Stage<kTiles, kReverse, kChannel>*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto chunk_of = [&](std::int64_t i) { return kReverse ? chunks - 1 - i : i; };
  const auto start = [&](std::int64_t i) {
    const std::int64_t chunk = chunk_of(i);
    start_loads(c.forward, c.p, kReverse ? c.p.dout : c.p.v, kReverse ? c.dout_rows : c.v_rows, place(chunk),
                slot + chunk, i_h, 64 * slice, stages[i % kStages]);
  };
  if (kStages > 1 && chunks > 0) start(0);
#pragma unroll 1
  for (std::int64_t i = 0; i < chunks; ++i) {
    if (kStages == 1) start(i);
    if (kStages > 1 && i + 1 < chunks) {
      start(i + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    Stage<kTiles, kReverse, kChannel>& stage = stages[i % kStages];
    const std::int64_t at = slice_index(c, slot + chunk_of(i), i_h, slice);
    sweep_chunk<E>(s, stage, (kReverse ? c.dstates : c.states) + at * kTiles * kTileBytes, warp, lane);
    __syncthreads();
    copy_tile((kReverse ? c.dresiduals : c.writes) + at * kTileBytes, stage.v);
    __syncthreads();
  }
}

// The forward sweep: a thread block walks from one saved state to the next, `interval_chunks` chunks at most.
// `saved_states` is the number of saved states per sequence. If sequences are packed it is 0, and every slot has a
// thread block, because only the device knows where saved states lie. Blocks of other slots end at once.
template <class E, int kTiles, int kStages, bool kChannel>
__global__ void __launch_bounds__(kSweepThreads, 1)
    states_kernel(const __grid_constant__ ChunkBackward<E> c, std::int64_t saved_states, std::int64_t interval_chunks) {
  const DeltaBackward<E>& p = c.p;
  const std::int64_t slice = blockIdx.x % c.slices, i_h = blockIdx.x / c.slices % p.shape.value_heads;
  std::int64_t slot = blockIdx.x / c.slices / p.shape.value_heads;
  if (saved_states > 0)
    slot = slot / saved_states * c.forward.slots_per_sequence + slot % saved_states * interval_chunks;
  const ChunkAt first = chunk_at(c.forward, slot);
  if (first.rows == 0 || (first.start - first.begin) % p.saved.interval != 0) return;
  const Sequence sequence = sequence_of(p, first.n);
  const std::int64_t before = (first.start - first.begin) / kChunkTokens,
                     chunks = min((first.end - first.start + kChunkTokens - 1) / kChunkTokens, interval_chunks);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float s[32 * kTiles];
#pragma unroll
  for (float& x : s) x = 0;
  const View<const float, 4> state = saved_state(p.chunk_states, first.i_b, sequence.chunk(first.start));
  for_each_element<kTiles>(s, state, 0, i_h, 64 * slice + 16 * warp, lane,
                           [](float& x, const float* from) { x = *from; });
  walk<kTiles, kStages, false, kChannel>(c, s, slot, chunks, i_h, slice, [&](std::int64_t chunk) {
    return place_of<kChunkTokens, true>(sequence, first.n, before + chunk);
  });
}

// The reverse sweep: a thread block walks a whole sequence.
template <class E, int kTiles, int kStages, bool kChannel>
__global__ void __launch_bounds__(kSweepThreads, 1) reverse_kernel(const __grid_constant__ ChunkBackward<E> c) {
  const DeltaBackward<E>& p = c.p;
  const std::int64_t slice = blockIdx.x % c.slices, i_h = blockIdx.x / c.slices % p.shape.value_heads;
  const std::int64_t n = blockIdx.x / c.slices / p.shape.value_heads;
  const Sequence sequence = sequence_of(p, n);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float ds[32 * kTiles];
  read_state<kTiles>(ds, p.dfinal_state, n, i_h, 64 * slice + 16 * warp, lane);
  walk<kTiles, kStages, true, kChannel>(
      c, ds, first_slot(c.forward, n), (sequence.end - sequence.begin + kChunkTokens - 1) / kChunkTokens, i_h, slice,
      [&](std::int64_t chunk) { return place_of<kChunkTokens, true>(sequence, n, chunk); });
  write_state<kTiles>(ds, p.dinitial_state, n, i_h, 64 * slice + 16 * warp, lane);
}

template <int kTiles, int kStages, bool kChannel, class E>
void launch_states(const ChunkBackward<E>& c, cudaStream_t stream) {
  constexpr int kBytes = kStages * sizeof(Stage<kTiles, false, kChannel>);
  const auto kernel = states_kernel<E, kTiles, kStages, kChannel>;
  const std::int64_t chunks = c.p.saved.interval / kChunkTokens;
  const std::int64_t saved_states = c.p.shape.packed > 0 ? 0 : (c.forward.slots_per_sequence + chunks - 1) / chunks;
  const std::int64_t starts = saved_states > 0 ? saved_states * c.p.shape.batch : c.forward.slots;
  const unsigned grid = grid_of("chunk_bwd", starts * c.p.shape.value_heads * c.slices);
  launch_kernel("chunk_bwd, states", kernel, grid, kSweepThreads, kBytes, stream, c, saved_states, chunks);
}

template <int kTiles, int kStages, bool kChannel, class E>
void launch_reverse(const ChunkBackward<E>& c, cudaStream_t stream) {
  constexpr int kBytes = kStages * sizeof(Stage<kTiles, true, kChannel>);
  const auto kernel = reverse_kernel<E, kTiles, kStages, kChannel>;
  const unsigned grid = grid_of("chunk_bwd", c.p.shape.sequences() * c.p.shape.value_heads * c.slices);
  launch_kernel("chunk_bwd, reverse", kernel, grid, kSweepThreads, kBytes, stream, c);
}

}  // namespace

template <class E>
void launch_sweep_states(const ChunkBackward<E>& c, cudaStream_t stream) {
  const bool narrow = c.p.shape.key_dim <= 64;
  if (has_decayed_rows(c.p.rule)) {
    return narrow ? launch_states<1, 2, true>(c, stream) : launch_states<2, 1, true>(c, stream);
  }
  narrow ? launch_states<1, 2, false>(c, stream) : launch_states<2, 2, false>(c, stream);
}

template <class E>
void launch_sweep_reverse(const ChunkBackward<E>& c, cudaStream_t stream) {
  const bool narrow = c.p.shape.key_dim <= 64;
  if (has_decayed_rows(c.p.rule)) {
    return narrow ? launch_reverse<1, 1, true>(c, stream) : launch_reverse<2, 1, true>(c, stream);
  }
  if (narrow) return launch_reverse<1, 2, false>(c, stream);
  if (has_shared_memory(2 * sizeof(Stage<2, true, false>))) return launch_reverse<2, 2, false>(c, stream);
  launch_reverse<2, 1, false>(c, stream);
}

template void launch_sweep_states(const ChunkBackward<bfloat16>&, cudaStream_t);
template void launch_sweep_states(const ChunkBackward<float16>&, cudaStream_t);
template void launch_sweep_reverse(const ChunkBackward<bfloat16>&, cudaStream_t);
template void launch_sweep_reverse(const ChunkBackward<float16>&, cudaStream_t);

}  // namespace efla::gpu
