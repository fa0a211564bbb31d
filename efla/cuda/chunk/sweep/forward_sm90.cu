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
// If keys are divided (walk_divided_keys), two warpgroups have half of the keys each, of the same 64 value columns.
// They send each other their parts of sums over keys.
//
// Chunk c has stage c % kStages for its rows and record c % kRecords. Barriers say that rows or a record have arrived,
// and that every warp has finished reading them.
#include <algorithm>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/chunk/state.cuh"
#include "efla/cuda/chunk/sweep/fused_record.cuh"
#include "efla/cuda/chunk/sweep/walk_sm90.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/common/tile.cuh"
#include "efla/cuda/common/wgmma.cuh"

namespace efla::gpu {
namespace {

// Multiplies the state by the decay over the chunk, s ← γ_C s.
template <int kCount, int kTiles, int kGroups, bool kChannel>
__device__ __forceinline__ void decay_state(float (&s)[kCount], const Rows<kTiles, kGroups, kChannel>& rows,
                                            const ChunkRecord& record, int lane) {
  if constexpr (kChannel) {
    scale_columns(s, rows.decay, lane);
  } else {
    const float decay = record.decay;
#pragma unroll
    for (float& x : s) x *= decay;
  }
}

// Writes a warp's 16 value columns of a chunk's outputs to a tile, from token `first` on.
template <class E, int kCount>
__device__ __forceinline__ void put_outputs(const float (&x)[kCount], unsigned char* tile, int warp, int lane,
                                            int first = 0) {
#pragma unroll
  for (int block = 0; block < kCount / 8; ++block) {
    const float* from = x + 8 * block;
    write_block_transposed(
        tile, first + 16 * block, 2 * warp,
        {pack<E>(from[0], from[1]), pack<E>(from[2], from[3]), pack<E>(from[4], from[5]), pack<E>(from[6], from[7])},
        lane);
  }
  __syncwarp();
}

// Copies a warp's 16 value columns of outputs from a tile to memory.
template <class E>
struct OutputColumns {
  E* to;  // the lane's piece in the lane's first row
  std::int64_t stride;
  int piece, row;
  bool exists;

  // `chunk` is the chunk whose outputs the first call of copy writes.
  __device__ __forceinline__ OutputColumns(const View<E, 4>& o, const Walk& walk, std::int64_t column, int chunk,
                                           int warp, int lane)
      : stride(o.stride[1]),
        piece(2 * warp + lane % 2),
        row(lane / 2 % 4 * 2 + lane / 8 % 2 + lane / 16 * 8),  // an order without bank conflicts
        exists(column + 8 * piece < o.extent[3]) {
    to = o.at(walk.i_b, walk.start(chunk) + row, walk.i_h, exists ? column + 8 * piece : 0);
  }

  // Writes the tokens of a chunk that are below `rows` and among the 16 · kPasses tokens from `first` on.
  template <int kPasses = 4>
  __device__ __forceinline__ void copy(const unsigned char* tile, int rows, int first = 0) const {
    if (!exists) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int at = first + 16 * pass;
      if (row + at >= rows) break;
      *reinterpret_cast<uint4*>(to + at * stride) =
          *reinterpret_cast<const uint4*>(tile + piece_offset(row + at, piece));
    }
  }
};

// Returns the view of one state of the walk's sequence and head. Each head has `per_head` states.
template <class T>
__device__ __forceinline__ View<T, 4> state_of(View<T, 4> states, const Walk& walk, int per_head = 1, int index = 0) {
  if (states) states.data = states.at(walk.n, walk.i_h * per_head + index);
  return states;
}

// Computes a warp's 16 rows of the state before the walked segment: the initial state, or from the state after the
// first segment S ← M S + N once per segment between. S and M are the sum of two matrices of elements, and the product
// of both lower matrices is left out.
template <int kTiles, int kGroups, bool kFused, bool kChannel, class E>
__device__ __forceinline__ void read_state_before(float (&s)[32 * kTiles], const ChunkProblem<E>& c,
                                                  std::int64_t column, int lane,
                                                  Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  const Walk& walk = shared.walk;
  if (kFused || walk.segment == 0) return read_state<kTiles>(s, state_of(c.p.initial_state, walk), 0, 0, column, lane);
  if constexpr (!kFused) {
    const auto read = [&](int segment) {
      read_state<kTiles>(s, state_of(c.segment_states, walk, c.segments - 1, segment), 0, 0, column, lane);
    };
    read(0);
#pragma unroll 1
    for (int segment = 1; segment < walk.segment; ++segment) {
      std::uint32_t high[kTiles][4][4], low[kTiles][4][4];
#pragma unroll
      for (int i = 0; i < 16 * kTiles; ++i) {
        const float x = s[2 * i], y = s[2 * i + 1];
        const std::uint32_t pair = pack<E>(x, y);
        high[i / 16][i / 4 % 4][i % 4] = pair;
        low[i / 16][i / 4 % 4][i % 4] = pack<E>(x - low_of<E>(pair), y - high_of<E>(pair));
      }
      read(segment);
      shared.map_ring.wait_full(segment - 1);
      products_fence();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const std::uint32_t map_high = shared_address(shared.map().high) + tile * kTiles * kTileBytes,
                            map_low = shared_address(shared.map().low) + tile * kTiles * kTileBytes;
        update_state<E, kTiles>(s, high[tile], map_high);
        update_state<E, kTiles>(s, low[tile], map_high);
        update_state<E, kTiles>(s, high[tile], map_low);
      }
      products_commit();
      products_wait<0>();
      __syncwarp();
      if (lane == 0) shared.map_ring.release(segment - 1);
    }
  }
}

// Writes a warp's 16 rows of a segment's map, transposed, from row `row` on.
template <class E, int kTiles>
__device__ __forceinline__ void write_map(const float (&s)[32 * kTiles], SegmentMap<kTiles>& map, int row, int lane) {
  if (row >= 64 * kTiles) return;
  const int tiles = row / 64 * kTiles * kTileBytes;
#pragma unroll
  for (int i = 0; i < 16 * kTiles; ++i) {
    const float x = s[2 * i], y = s[2 * i + 1];
    const std::uint32_t high = pack<E>(x, y);
    const int at = tiles + piece_offset(row % 64 + lane / 4 + i % 2 * 8, i / 2) + lane % 4 * 4;
    *reinterpret_cast<std::uint32_t*>(map.high + at) = high;
    *reinterpret_cast<std::uint32_t*>(map.low + at) = pack<E>(x - low_of<E>(high), y - high_of<E>(high));
  }
}

// Returns where to write the state after the walked segment; a view without data if it is not needed.
template <class E>
__device__ __forceinline__ View<float, 4> state_after(const ChunkProblem<E>& c, const Walk& walk) {
  if (walk.segment == c.segments - 1) return state_of(c.p.final_state, walk);
  return walk.segment == 0 ? state_of(c.segment_states, walk, c.segments - 1, 0) : View<float, 4>{};
}

// Converts U, which is in e, to operands u, and write∘U to operands `written`. Leaves write∘U in e.
template <class E>
__device__ __forceinline__ void make_write_operands(std::uint32_t (&u)[4][4], std::uint32_t (&written)[4][4],
                                                    float (&e)[32], const ChunkRecord& record, int lane) {
#pragma unroll
  for (int step = 0; step < 4; ++step) to_operand<E>(u[step], e + 8 * step);
  scale_columns(e, record.write, lane);
#pragma unroll
  for (int step = 0; step < 4; ++step) to_operand<E>(written[step], e + 8 * step);
}

// Runs warpgroup `group`, which carries 64 value columns of the state through the walk and computes outputs.
//
// kDeferred: the product P U of a chunk is computed while the next chunk's residual is computed.
//
// kStored: the copy engine writes the outputs from the tile in which the values were. It does so in the sweep with one
// warpgroup of the state and in the fused kernel with two. In the other two kernels the warps write the outputs. The
// fused kernel with one warpgroup does without the copy engine, because chunks would wait for records, and records for
// tiles. Warps always write the outputs of a chunk that the sequence does not fill, because the rows after it belong to
// another sequence.
template <int kTiles, int kGroups, bool kFused, bool kChannel, class E>
__device__ __forceinline__ void walk_outputs(const ChunkProblem<E>& c, const CUtensorMap& outputs, int group,
                                             int thread, Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  constexpr int kStages = Shared<kTiles, kGroups, kFused, kChannel>::kStages,
                kRecords = Shared<kTiles, kGroups, kFused, kChannel>::kRecords;
  constexpr bool kDeferred = kGroups == 1 && !kFused;
  constexpr bool kStored = kFused == (kGroups == 2);
  const int warp = warp_of(thread), lane = thread % 32;
  const Walk& walk = shared.walk;
  const int tail = walk.tail;
  const std::int64_t column = walk.column + 64 * group;
  float s[32 * kTiles], e[32], o[32];
  std::uint32_t u[4][4] = {};
  read_state_before(s, c, column + 16 * warp, lane, shared);
  OutputColumns<E> columns(c.p.o, walk, column, 0, warp, lane);
  leave_undefined(e);
  leave_undefined(o);
  const auto free_record = [&](int chunk) {
    __syncwarp();
    if (kFused || lane == 0) shared.record_ring.release(chunk);
  };
  const auto write_chunk = [&](int chunk, unsigned char* tile) {
    put_outputs<E>(o, tile, warp, lane);
    if constexpr (!kStored) {
      columns.copy(tile, walk.rows(chunk));
      columns.to += kChunkTokens * columns.stride;
    } else if (chunk == tail) {
      const int own = opaque(thread);  // opaque, because registers are scarce for addresses kept until here
      OutputColumns<E>(c.p.o, walk, walk.column + 64 * group, chunk, warp_of(own), own % 32)
          .copy(tile, walk.rows(chunk));
    } else {
      fence_async_proxy();
      if (group == 0) {
        named_barrier(kOutputsBarrier, kGroupThreads);
      } else {
        named_barrier(kOutputsBarrier + 1, kGroupThreads);
      }
      if (thread == 0) {
        store_tile(&outputs, tile, walk.column + 64 * group, walk.i_h, walk.start(chunk), walk.i_b);
      }
    }
  };
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    auto& rows = shared.rows[chunk % kStages];
    const ChunkRecord& record = shared.record[chunk % kRecords];
    unsigned char* tile = rows.v + group * kTileBytes;
    save_state<kTiles>(s, c.p, walk.i_b, walk.i_h, walk.first_saved, walk.first_chunk + chunk, column + 16 * warp,
                       lane);
    std::uint32_t operand[4 * kTiles][4], written[4][4];
#pragma unroll
    for (int step = 0; step < 4 * kTiles; ++step) to_operand<E>(operand[step], s + 8 * step);
    wait_for_rows(chunk, tail, shared);
    products_fence();
    multiply_state<E, kTiles>(e, operand, shared_address(rows.k));
    products_commit();
    if constexpr (!kDeferred) {
      multiply_state<E, kTiles>(o, operand, shared_address(rows.q));
      products_commit();
    } else {  // of the previous chunk; for the first chunk the result is overwritten
      multiply_chunk<E>(o, u, shared.record[(chunk + kRecords - 1) % kRecords].p, true);
      products_commit();
    }
    if constexpr (kStored && !kDeferred) {  // by now the copy engine has read the previous chunk's outputs
      if (chunk > 0) {
        store_bulk_wait();
        shared.rows_ring.release(chunk - 1);
      }
    }
    shared.record_ring.wait_full(chunk);
    products_wait<kDeferred ? 1 : 0>();  // with two groups one hides the wait of the other, and registers are scarce
    residual<E>(written, e, shared_address(tile), record, warp, lane);
    products_fence();
    multiply_chunk<E>(e, written, record.t, false);
    products_commit();
    if constexpr (kDeferred) {
      products_wait<1>();
      if (chunk > 0) {
        free_record(chunk - 1);
        write_chunk(chunk - 1, tile);
      }
      products_fence();
      multiply_state<E, kTiles>(o, operand, shared_address(rows.q));
      products_commit();
    }
    products_wait<kDeferred ? 1 : 0>();
    make_write_operands<E>(u, written, e, record, lane);
    decay_state(s, rows, record, lane);
    products_fence();
    update_state<E, kTiles>(s, written, shared_address(rows.written()));
    products_commit();
    if constexpr (kDeferred) products_wait<1>();
    scale_columns(o, record.out, lane);
    if constexpr (!kDeferred) {
      products_fence();
      multiply_chunk<E>(o, u, record.p, true);
      products_commit();
    }
    finish_products(s);
    if constexpr (!kDeferred) {
      free_record(chunk);
      write_chunk(chunk, tile);
    }
    if constexpr (kStored && kDeferred) store_bulk_wait();
    __syncwarp();
    if (kFused ? !kStored : lane == 0) shared.rows_ring.release(chunk);
  }
  if (kDeferred && walk.chunks > 0) {
    const int chunk = walk.chunks - 1;
    products_fence();
    multiply_chunk<E>(o, u, shared.record[chunk % kRecords].p, true);
    products_commit();
    products_wait<0>();
    named_barrier(kOutputsBarrier, kGroupThreads);  // the first thread has waited for the copy from this tile
    write_chunk(chunk, shared.rows[chunk % kStages].v + group * kTileBytes);
  }
  if constexpr (kStored) store_bulk_wait();
  const int own = opaque(thread);
  write_state<kTiles>(s, state_after(c, walk), 0, 0, walk.column + 64 * group + 16 * warp_of(own), own % 32);
}

// Runs the warpgroup that has half `half` of the keys of a state. It computes the outputs of half of a chunk's tokens.
template <int kTiles, class E>
__device__ __forceinline__ void walk_divided_keys(const ChunkProblem<E>& c, int half, int thread,
                                                  Shared<kTiles, 1, false, false>& shared) {
  constexpr int kStages = Shared<kTiles, 1, false, false>::kStages,
                kRecords = Shared<kTiles, 1, false, false>::kRecords, kOwn = kOwnTiles<kTiles>;
  const int warp = warp_of(thread), lane = thread % 32, key = 64 * kOwn * half, token = 32 * half;
  const Walk& walk = shared.walk;
  const int tail = walk.tail;
  const std::int64_t column = walk.column + 16 * warp;
  Exchange& exchange = shared.exchange;
  unsigned char *own = shared.exchanged[half], *other = shared.exchanged[1 - half];
  float s[32 * kOwn], e[32], o[32];
  read_state<kOwn>(s, keys_from(state_of(c.p.initial_state, walk), key), 0, 0, column, lane);
  OutputColumns<E> columns(c.p.o, walk, walk.column, 0, warp, lane);
  leave_undefined(e);
  leave_undefined(o);
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    auto& rows = shared.rows[chunk % kStages];
    const ChunkRecord& record = shared.record[chunk % kRecords];
    const unsigned char *k = rows.k + half * kOwn * kTileBytes, *q = rows.q + half * kOwn * kTileBytes;
    save_state<kOwn>(s, c.p, walk.i_b, walk.i_h, walk.first_saved, walk.first_chunk + chunk, column, lane, key);
    std::uint32_t operand[4 * kOwn][4], written[4][4], u[4][4];
#pragma unroll
    for (int step = 0; step < 4 * kOwn; ++step) to_operand<E>(operand[step], s + 8 * step);
    wait_for_rows(chunk, tail, shared);
    products_fence();
    multiply_state<E, kOwn>(e, operand, shared_address(k));
    products_commit();
    multiply_state<E, kOwn>(o, operand, shared_address(q));
    products_commit();
    products_wait<1>();
    exchange.send(e, own, 0, warp, lane);
    exchange.add_received(e, other, 0, warp, lane);
    exchange.release(warp);
    shared.record_ring.wait_full(chunk);
    residual<E>(written, e, shared_address(rows.v), record, warp, lane);
    products_fence();
    multiply_chunk<E>(e, written, record.t, false);
    products_commit();
    products_wait<1>();
    float outputs[16], others[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      outputs[i] = half == 0 ? o[i] : o[16 + i];
      others[i] = half == 0 ? o[16 + i] : o[i];
    }
    exchange.send(others, own, 1, warp, lane);
    products_wait<0>();
    make_write_operands<E>(u, written, e, record, lane);
    decay_state(s, rows, record, lane);
    products_fence();
    update_state<E, kOwn>(s, written, shared_address(k));
    products_commit();
    exchange.add_received(outputs, other, 1, warp, lane);
    exchange.release(warp);
    scale_columns(outputs, record.out + token, lane);
    products_fence();
    multiply_half_chunk<E>(outputs, u, record.p + 128 * token);
    products_commit();
    finish_products(s);
    put_outputs<E>(outputs, rows.v, warp, lane, token);
    columns.template copy<2>(rows.v, walk.rows(chunk), token);
    columns.to += kChunkTokens * columns.stride;
    __syncwarp();
    if (lane == 0) {
      shared.record_ring.release(chunk);
      shared.rows_ring.release(chunk);
    }
  }
  write_state<kOwn>(s, keys_from(state_after(c, walk), key), 0, 0, column, lane);
}

// Runs warpgroup `group`, which computes 64 columns of M or N of a segment, without outputs.
template <int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void walk_map(const ChunkProblem<E>& c, int group, int thread,
                                         Shared<kTiles, kGroups, false, kChannel>& shared) {
  constexpr int kStages = Shared<kTiles, kGroups, false, kChannel>::kStages,
                kRecords = Shared<kTiles, kGroups, false, kChannel>::kRecords;
  const int warp = warp_of(thread), lane = thread % 32;
  const Walk& walk = shared.walk;
  const int tail = walk.tail;
  const std::int64_t column = walk.column + 64 * group + 16 * warp;
  float s[32 * kTiles], e[32];
#pragma unroll
  for (float& x : s) x = 0;
  if (walk.map) set_identity<kTiles>(s, column, lane);
  leave_undefined(e);
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    auto& rows = shared.rows[chunk % kStages];
    const ChunkRecord& record = shared.record[chunk % kRecords];
    std::uint32_t operand[4 * kTiles][4], written[4][4];
#pragma unroll
    for (int step = 0; step < 4 * kTiles; ++step) to_operand<E>(operand[step], s + 8 * step);
    wait_for_rows(chunk, tail, shared);
    products_fence();
    multiply_state<E, kTiles>(e, operand, shared_address(rows.k));
    products_commit();
    shared.record_ring.wait_full(chunk);
    products_wait<0>();
    residual<E>(written, e, shared_address(rows.v + group * kTileBytes), record, warp, lane);
    products_fence();
    multiply_chunk<E>(e, written, record.t, false);
    products_commit();
    decay_state(s, rows, record, lane);
    products_wait<0>();
    scale_columns(e, record.write, lane);
#pragma unroll
    for (int step = 0; step < 4; ++step) to_operand<E>(written[step], e + 8 * step);
    products_fence();
    update_state<E, kTiles>(s, written, shared_address(rows.written()));
    products_commit();
    products_wait<0>();
    __syncwarp();
    if (lane == 0) {
      shared.record_ring.release(chunk);
      shared.rows_ring.release(chunk);
    }
  }
  if (walk.map) {
    write_map<E>(s, *segment_map<kTiles>(c, walk, walk.segment), static_cast<int>(column), lane);
  } else {
    write_state<kTiles>(s, state_of(c.segment_states, walk, c.segments - 1, walk.segment), 0, 0, column, lane);
  }
}

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

template <class E, int kTiles, int kGroups, bool kFused, bool kOutputs, bool kChannel>
__global__ void __launch_bounds__(threads<kTiles, kGroups, kFused>(), 1)
    sweep_kernel(const __grid_constant__ ChunkProblem<E> c, const __grid_constant__ RowMaps maps,
                 const __grid_constant__ CUtensorMap outputs) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kTiles, kGroups, kFused, kChannel>*>(memory);
  // The shared memory of thread blocks that compute the first segment's outputs in a launch of the maps.
  [[maybe_unused]] auto& first = *reinterpret_cast<Shared<kTiles, 1, false, kChannel>*>(memory);
  __shared__ Walk walk;
  let_next_kernel_begin();
  if constexpr (kFused) wait_for_kernels();
  if (threadIdx.x == 0) {
    walk = walk_of<kGroups, kOutputs>(c);
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
      walk_outputs(c, outputs, group, thread, shared);
    } else if (!walk.outputs) {
      walk_map(c, group, thread, shared);
    } else if (group == 0) {
      walk_outputs(c, outputs, 0, thread, first);
    }
  } else if constexpr (!kFused) {
    if constexpr (kOwners == 2) give_registers<40>();
    if (thread >= 32) return;
    if (!kOutputs && walk.outputs) {
      copy_chunks<true>(c, maps, thread, first);
    } else {
      copy_chunks<kOutputs>(c, maps, thread, shared);
    }
  } else if (group == kGroups) {
    if constexpr (kGroups == 2) give_registers<64>();
    prepare_keys(c, thread, shared);
  } else {
    if constexpr (kGroups == 2) give_registers<64>();
    prepare_queries(c, maps, thread, shared);
  }
}

template <int kTiles, int kGroups, bool kFused, bool kChannel, bool kOutputs = true, class E>
void launch(const ChunkProblem<E>& c, const RowMaps& maps, const CUtensorMap& outputs, cudaStream_t stream) {
  constexpr int kBytes = std::max(sizeof(Shared<kTiles, kGroups, kFused, kChannel>),
                                  kOutputs ? 0 : sizeof(Shared<kTiles, 1, false, kChannel>)),
                kColumns = 64 * kGroups;
  static_assert(kBytes + sizeof(Walk) <= 227 * 1024);
  const auto kernel = sweep_kernel<E, kTiles, kGroups, kFused, kOutputs, kChannel>;
  const int blocks = kOutputs ? sweep_blocks(c, kColumns) : map_blocks(c, kColumns);
  const unsigned grid = grid_of("chunk_fwd", c.p.shape.sequences() * c.p.shape.value_heads * blocks);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  launch_early("sweep", kernel, grid, threads<kTiles, kGroups, kFused>(), kBytes, stream, c, maps, outputs);
}

// Launches the maps, if sequences are cut into segments, and then the sweep. With few heads a thread block has 64 value
// columns, otherwise 128.
template <int kTiles, bool kChannel, class E>
void launch_sweep(const ChunkProblem<E>& c, const RowMaps& maps, const CUtensorMap& outputs, cudaStream_t stream) {
  if (c.segments > 1) {
    launch<kTiles, 2, false, kChannel, false>(c, maps, outputs, stream);
  }
  if (c.p.shape.value_dim > 64 &&
      c.p.shape.sequences() * c.p.shape.value_heads * (c.segments - (c.segments > 1 ? 1 : 0)) >= kManyHeads) {
    return launch<kTiles, 2, false, kChannel>(c, maps, outputs, stream);
  }
  launch<kTiles, 1, false, kChannel>(c, maps, outputs, stream);
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
  if (has_channel_gate(problem)) {
    return narrow ? launch_sweep<1, true>(problem, maps, outputs, stream)
                  : launch_sweep<2, true>(problem, maps, outputs, stream);
  }
  narrow ? launch_sweep<1, false>(problem, maps, outputs, stream)
         : launch_sweep<2, false>(problem, maps, outputs, stream);
}

template void launch_sweep_sm90(const ChunkProblem<bfloat16>&, const RowMaps&, const CUtensorMap&, bool, cudaStream_t);
template void launch_sweep_sm90(const ChunkProblem<float16>&, const RowMaps&, const CUtensorMap&, bool, cudaStream_t);

}  // namespace efla::gpu
