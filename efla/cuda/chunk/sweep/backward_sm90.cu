// The two sweeps of the backward by chunks on Hopper GPUs, with products by wgmma. They compute the equations at
// ChunkBackward (chunk_bwd.h); docs/design/2026-11-cuda-backward.md explains them.
//
// A thread block walks chunks for kGroups slices of 64 value columns. As in forward_sm90.cu, each of kGroups warpgroups
// keeps 64 rows of a transposed state in registers. One more warp copies rows and records before they are needed, and
// another one counts the chunks that have been written. If keys are divided, two warpgroups have half of the keys each,
// of the same 64 value columns, and exchange their parts of sums over keys.
//
// The reverse sweep walks whole sequences, the forward sweep from every saved state to the next. Neither reads what the
// other writes, so they run at the same time: the forward sweep fills multiprocessors that few heads leave idle in the
// reverse sweep.
#include "efla/cuda/chunk/chunk_bwd.h"
#include "efla/cuda/chunk/products.cuh"
#include "efla/cuda/chunk/state.cuh"
#include "efla/cuda/chunk/sweep/walk_sm90.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/heuristics.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/saved_state.cuh"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/common/tile.cuh"
#include "efla/cuda/common/wgmma.cuh"

namespace efla::gpu {
namespace {

// The shared memory of a thread block. `v` of a stage has the values, later U, or dO, later D.
template <int kTiles, int kGroups, bool kChannel>
struct BackwardShared {
  // Three stages would exceed the shared memory with a gate per key channel and two groups, and with divided keys.
  // Three records would exceed it with a gate per key channel or with two groups.
  static constexpr int kStages = (kChannel && kGroups == 2) || kDivided<kTiles> ? 2 : gpu::kStages,
                       kRecords = kChannel || kGroups == 2 ? 2 : kStages, kOwners = kStateGroups<kTiles, kGroups>;
  alignas(1024) Rows<kTiles, kGroups, kChannel> rows[kStages];
  RecordAt record[kRecords];
  unsigned char state[kOwners][kOwnTiles<kTiles> * kTileBytes];  // S or dS' on the way to memory; the exchange
  Walk walk;
  bool idle;                // whether there is no walk for the thread block
  Ring<kStages> rows_ring;  // chunk number i of the walk has stage i of both rings
  Ring<kRecords> record_ring;
  std::uint64_t tail;  // of the copies of a chunk that the sequence does not fill
  Exchange exchange;
  int written[kOwners * kGroupWarps];  // how many chunks each warp of the state has written
};

// Returns the walk of thread block `block` of a sweep. `parts` is the number of blocks that divide the value columns,
// with `columns` columns each. `interval` is the number of tokens between saved states, or 0 for walks of whole
// sequences. All lanes of a warp take part.
template <class E>
__device__ __forceinline__ Walk backward_walk(const ChunkBackward<E>& c, unsigned block, int parts, int columns,
                                              std::int64_t interval) {
  Walk walk{};
  walk.column = static_cast<int>(block % parts) * columns;
  block /= parts;
  const auto heads = static_cast<unsigned>(c.p.shape.value_heads);
  walk.i_h = static_cast<int>(block % heads);
  walk.i_q = walk.i_h / static_cast<int>(c.p.shape.group());
  std::int64_t index = block / heads;
  walk.n = index;
  if (interval > 0) {
    if (c.p.shape.packed > 0) {
      const auto first = [&](std::int64_t n) { return c.p.cu_seqlens(n) / interval + n; };
      walk.n = find_sequence(c.p.shape.packed, index, first);
      index -= first(walk.n);
    } else {  // the last chunks first, in the order of the reverse sweep
      walk.n = index % c.p.shape.batch;
      index = c.p.shape.chunks(interval) - 1 - index / c.p.shape.batch;
    }
  }
  const Sequence sequence = sequence_of(c.p, walk.n);
  const std::int64_t begin = interval > 0 ? sequence.begin + index * interval : sequence.begin,
                     end = interval > 0 ? min(sequence.end, begin + interval) : sequence.end;
  walk.i_b = static_cast<int>(sequence.i_b);
  walk.begin = static_cast<int>(begin);
  walk.end = static_cast<int>(end);
  walk.slot = first_slot(c.forward, walk.n) + (begin - sequence.begin) / kChunkTokens;
  walk.chunks = static_cast<int>(max(std::int64_t{0}, (end - begin + kChunkTokens - 1) / kChunkTokens));
  return walk;
}

// Claims one of `walks` walks for a thread block and returns its number, or a number that is not below `walks` if none
// is left. Run by one thread. The two multiprocessors of a pair seem to fetch instructions through one cache, and the
// code of the gradients is long. A walk of the reverse sweep therefore takes longer beside a thread block of the
// gradients than beside another walk. So thread blocks on all multiprocessors claim walks in pairs: the second block of
// a pair claims for both. A block claims one walk for itself if the second does not come for long, because the other
// multiprocessor has other work. See "Pairs of multiprocessors" in docs/design/2026-11-cuda-backward.md.
__device__ inline unsigned claim_walk(unsigned* claims, unsigned walks) {
  constexpr unsigned kWaiting = 1, kClaiming = 2, kClaimed = 3;  // of a pair; kClaimed + w: the first block gets walk w
  unsigned multiprocessor = 0;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  unsigned* pair = claims + 1 + multiprocessor / 2 % (kClaims - 1);
  const auto read = [](const unsigned* from) { return *static_cast<const volatile unsigned*>(from); };
  const unsigned before = atomicCAS(pair, 0, kWaiting);
  if (before == kWaiting && atomicCAS(pair, kWaiting, kClaiming) == kWaiting) {
    const unsigned walk = atomicAdd(claims, 2);
    atomicExch(pair, kClaimed + walk + 1);
    return walk;
  }
  const long long begin = clock64();
  while (read(claims) < walks && clock64() - begin < kClaimPatience) {
    const unsigned now = before == 0 ? read(pair) : 0;
    if (now >= kClaimed) return now - kClaimed;
    __nanosleep(100);
  }
  if (before == 0 && atomicCAS(pair, kWaiting, 0) != kWaiting) {
    while (read(pair) < kClaimed) {
    }
    return read(pair) - kClaimed;
  }
  return read(claims) < walks ? atomicAdd(claims, 1) : walks;
}

// Returns the chunk that a walk visits as number `i`.
template <bool kReverse>
__device__ __forceinline__ int chunk_of(const Walk& walk, int i) {
  return kReverse ? walk.chunks - 1 - i : i;
}

// Runs the warp that copies rows and records. In reverse it copies q, k, dO and the whole record, otherwise k, v and
// the record without P. `values` describes dO or v. Rows after the sequence's end belong to another sequence and become
// zeros; ScaledRows have zeros there.
template <bool kReverse, int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void copy_chunks(const ChunkBackward<E>& c, const RowMaps& maps, const CUtensorMap& values,
                                            int lane, BackwardShared<kTiles, kGroups, kChannel>& shared) {
  const Walk& walk = shared.walk;
  using Memory = BackwardShared<kTiles, kGroups, kChannel>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords;
  const ChunkRecord* records = &c.forward.records[walk.slot * c.p.shape.value_heads + walk.i_h];
  if constexpr (kReverse && kChannel) wait_for_kernels();
#pragma unroll 1
  for (int i = 0; i < walk.chunks; ++i) {
    const int chunk = chunk_of<kReverse>(walk, i), stage = i % kStages, count = walk.rows(chunk);
    auto& rows = shared.rows[stage];
    const bool is_tail = count < kChunkTokens;
    if (lane == 0) {
      std::uint64_t* full = is_tail ? &shared.tail : shared.rows_ring.full.of(i);
      shared.rows_ring.wait_free(i);
      copy_chunk_rows<kReverse>(c.forward, maps, values, true, walk, chunk, rows, full);
      // The copies above need no wait, because `prepare` reads the same rows.
      if (kReverse && !kChannel && i == 0) wait_for_kernels();
      copy_record<kReverse>(records[chunk * c.p.shape.value_heads], shared.record[i % kRecords], shared.record_ring, i);
    }
    __syncwarp();
    if (is_tail) {
      barrier_wait(&shared.tail, 0);
      for (int tile = 0; tile < kTiles && !kChannel; ++tile) {
        clear_rows(rows.k + tile * kTileBytes, count, lane, 32);
        if constexpr (kReverse) clear_rows(rows.q + tile * kTileBytes, count, lane, 32);
      }
      for (int tile = 0; tile < kGroups; ++tile) clear_rows(rows.v + tile * kTileBytes, count, lane, 32);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) shared.rows_ring.full.arrive(i);
    }
  }
}

// Runs the warp that counts written chunks in `ready`. It counts several chunks at once, because the fence before a
// count waits for all stores of the multiprocessor.
template <bool kReverse, int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void count_chunks(const ChunkBackward<E>& c, int lane,
                                             BackwardShared<kTiles, kGroups, kChannel>& shared) {
  const Walk& walk = shared.walk;
  unsigned* ready = &c.ready[walk.slot * c.p.shape.value_heads + walk.i_h];
  int counted = 0;
  while (counted < walk.chunks) {
    const int of_warp = lane < shared.kOwners * kGroupWarps ? load_acquire(&shared.written[lane]) : walk.chunks;
    const int written = __reduce_min_sync(0xffffffffU, of_warp);
    if (written < min(counted + kCountedTogether, walk.chunks)) {
      __nanosleep(100);
      continue;
    }
    __syncwarp();
    if (lane == 0) {
      fence_for_counts();
      for (int i = counted; i < written; ++i) {
        add_count(ready + chunk_of<kReverse>(walk, i) * c.p.shape.value_heads, kGroups);
      }
    }
    counted = written;
  }
}

// Copies a warp's 16 rows of a state, which are operands, to shared memory (`tiles`) and starts one bulk copy per tile
// to the image `to`.
template <int kTiles>
__device__ __forceinline__ void store_state(const std::uint32_t (&state)[4 * kTiles][4], unsigned char* tiles,
                                            unsigned char* to, int warp, int lane) {
  if (lane == 0) store_bulk_wait();
  __syncwarp();
#pragma unroll
  for (int step = 0; step < 4 * kTiles; ++step) write_block(tiles, 16 * warp, 2 * step, state[step], lane);
  fence_async_proxy();
  __syncwarp();
  if (lane != 0) return;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int at = tile * kTileBytes + 16 * warp * 128;
    store_bulk(to + at, tiles + at, 16 * 128);
  }
}

// Waits for the bulk copies of all states and says that `chunks` chunks have been written.
__device__ __forceinline__ void finish_states(int chunks, int* written, int lane) {
  if (lane != 0) return;
  store_bulk_finish<0>();
  store_release(written, chunks);
}

// Writes a warp's 16 value columns of U or D, which are operands, to the image `to`, through `tile` in shared memory.
__device__ __forceinline__ void store_columns(const std::uint32_t (&x)[4][4], unsigned char* tile, unsigned char* to,
                                              int warp, int lane) {
#pragma unroll
  for (int block = 0; block < 4; ++block) write_block_transposed(tile, 16 * block, 2 * warp, x[block], lane);
  __syncwarp();
  const int piece = 2 * warp + lane % 2, row = lane / 2 % 4 * 2 + lane / 8 % 2 + lane / 16 * 8;
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int at = piece_offset(row + 16 * pass, piece);
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(tile + at);
  }
}

// Reads a warp's 16 rows of the saved state before the walk, from key `first_key` on. `column` is the first row's value
// column.
template <int kTiles, class E>
__device__ __forceinline__ void read_saved(float (&s)[32 * kTiles], const ChunkBackward<E>& c, const Walk& walk,
                                           std::int64_t column, int lane, int first_key) {
  const Sequence sequence = sequence_of(c.p, walk.n);
  const View<const float, 4> state = saved_state(c.p.chunk_states, walk.i_b, sequence.chunk(walk.begin));
  for_each_element<kTiles>(s, keys_from(state, first_key), 0, walk.i_h, column, lane,
                           [](float& x, const float* from) { x = *from; });
}

// Adds the other half's part of the sums over keys to e, for chunk number `i` of the walk. Does nothing for undivided
// keys.
template <int kTiles, int kGroups, bool kChannel>
__device__ __forceinline__ void add_other_half(float (&e)[32], int half, int i, int warp, int lane,
                                               BackwardShared<kTiles, kGroups, kChannel>& shared) {
  if constexpr (kDivided<kTiles>) {
    const unsigned use = static_cast<unsigned>(i) & 1U;
    if (lane == 0) store_bulk_wait();
    __syncwarp();
    shared.exchange.send(e, shared.state[half], use, warp, lane);
    shared.exchange.add_received(e, shared.state[1 - half], use, warp, lane);
  }
}

// Waits until the other half has also called this function for chunk number `i`. Then this half may overwrite what it
// has sent and what both halves have read. Does nothing for undivided keys.
template <int kTiles, int kGroups, bool kChannel>
__device__ __forceinline__ void wait_for_other_half(int i, int warp,
                                                    BackwardShared<kTiles, kGroups, kChannel>& shared) {
  if constexpr (kDivided<kTiles>) {
    shared.exchange.release(warp);
    shared.exchange.wait_for_release(static_cast<unsigned>(i) & 1U, warp);
  }
}

// Runs a warpgroup of the forward sweep, which writes S and U of every chunk.
template <int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void walk_forwards(const ChunkBackward<E>& c, int group, int thread,
                                              BackwardShared<kTiles, kGroups, kChannel>& shared) {
  using Memory = BackwardShared<kTiles, kGroups, kChannel>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords, kOwn = kOwnTiles<kTiles>;
  const int warp = warp_of(thread), lane = thread % 32;
  const Walk& walk = shared.walk;
  if (walk.chunks == 0) return;
  const int slice = kDivided<kTiles> ? 0 : group, tiles = kDivided<kTiles> ? group * kOwn : 0;
  const std::int64_t column = walk.column + 64 * slice + 16 * warp;
  float s[32 * kOwn], e[32];
#pragma unroll
  for (float& x : s) x = 0;
  read_saved<kOwn>(s, c, walk, column, lane, 64 * tiles);
  leave_undefined(e);
  std::int64_t image = slice_index(c, walk.slot, walk.i_h, walk.column / 64 + slice);
#pragma unroll 1
  for (int i = 0; i < walk.chunks; ++i) {
    auto& rows = shared.rows[i % kStages];
    const ChunkRecord& record = shared.record[i % kRecords];
    unsigned char* tile = rows.v + slice * kTileBytes;
    std::uint32_t state[4 * kOwn][4], written[4][4], u[4][4];
    to_operands<E>(state, s);
    shared.rows_ring.wait_full(i);
    products_fence();
    multiply_state<E, kOwn>(e, state, shared_address(rows.k + tiles * kTileBytes));
    products_commit();
    shared.record_ring.wait_full(i);
    const float decay = record.decay;
    products_wait<0>();
    add_other_half(e, group, i, warp, lane, shared);
    residual<E>(written, e, shared_address(tile), record, warp, lane);
    wait_for_other_half(i, warp, shared);
    products_fence();
    multiply_chunk<E>(e, written, record.t, false);
    products_commit();
    store_state<kOwn>(state, shared.state[group], c.states + (image * kTiles + tiles) * kTileBytes, warp, lane);
    if constexpr (kChannel) {
      scale_columns(s, rows.decay, lane);
    } else {
#pragma unroll
      for (float& x : s) x *= decay;
    }
    products_wait<0>();
    to_operands<E>(u, e);
    scale_columns(e, record.write, lane);
    to_operands<E>(written, e);
    products_fence();
    update_state<E, kOwn>(s, written, shared_address(rows.written() + tiles * kTileBytes));
    products_commit();
    if (tiles == 0) store_columns(u, tile, c.writes + image * kTileBytes, warp, lane);
    image += c.p.shape.value_heads * c.slices;
    products_wait<0>();
    __syncwarp();
    if (lane == 0) {
      shared.record_ring.release(i);
      shared.rows_ring.release(i);
      store_bulk_finish<kOwn>();
      store_release(&shared.written[group * kGroupWarps + warp], i);
    }
  }
  finish_states(walk.chunks, &shared.written[group * kGroupWarps + warp], lane);
}

// Multiplies column j of x by factors[j], which is in shared memory, and adds y.
__device__ __forceinline__ void add_scaled(float (&x)[32], const float* factors, const float (&y)[32], int lane) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (lane % 4));
#pragma unroll
    for (int r = 0; r < 4; ++r) x[4 * j + r] = (r % 2 == 0 ? factor.x : factor.y) * x[4 * j + r] + y[4 * j + r];
  }
}

// Rounds to operands minus x, with column j times factors[j], which is in shared memory.
template <class E>
__device__ __forceinline__ void negative_operands(std::uint32_t (&operand)[4][4], const float (&x)[32],
                                                  const float* factors, int lane) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (lane % 4));
    operand[j / 2][j % 2 * 2] = pack<E>(-factor.x * x[4 * j], -factor.y * x[4 * j + 1]);
    operand[j / 2][j % 2 * 2 + 1] = pack<E>(-factor.x * x[4 * j + 2], -factor.y * x[4 * j + 3]);
  }
}

// Runs a warpgroup of the reverse sweep, which writes dS' and D of every chunk.
template <int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void walk_in_reverse(const ChunkBackward<E>& c, int group, int thread,
                                                BackwardShared<kTiles, kGroups, kChannel>& shared) {
  using Memory = BackwardShared<kTiles, kGroups, kChannel>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords, kOwn = kOwnTiles<kTiles>;
  const int warp = warp_of(thread);
  const Walk& walk = shared.walk;
  const int slice = kDivided<kTiles> ? 0 : group, tiles = kDivided<kTiles> ? group * kOwn : 0;
  const std::int64_t column = walk.column + 64 * slice + 16 * warp;
  float ds[32 * kOwn], e[32], of_outputs[32];
  read_state<kOwn>(ds, keys_from(c.p.dfinal_state, 64 * tiles), walk.n, walk.i_h, column, thread % 32);
  leave_undefined(e);
  leave_undefined(of_outputs);
  std::int64_t image = slice_index(c, walk.slot + walk.chunks - 1, walk.i_h, walk.column / 64 + slice);
#pragma unroll 1
  for (int i = 0; i < walk.chunks; ++i) {
    const int lane = opaque(thread % 32);
    auto& rows = shared.rows[i % kStages];
    const ChunkRecord& record = shared.record[i % kRecords];
    unsigned char* tile = rows.v + slice * kTileBytes;
    std::uint32_t state[4 * kOwn][4], operand[4][4], scaled[4][4], of_read[4][4];
    to_operands<E>(state, ds);
    shared.record_ring.wait_full(i);
    if constexpr (kChannel) {
      shared.rows_ring.wait_full(i);
      scale_columns(ds, rows.decay, lane);
    } else {
      const float decay = record.decay;
#pragma unroll
      for (float& x : ds) x *= decay;
    }
#pragma unroll
    for (float& x : ds) asm volatile("" : "+f"(x));  // scaled before the first product, or ptxas serialises products
    if constexpr (!kChannel) shared.rows_ring.wait_full(i);
    products_fence();
    multiply_state<E, kOwn>(e, state, shared_address(rows.written() + tiles * kTileBytes));
    products_commit();
    column_operands(operand, shared_address(tile), warp, lane);
    products_fence();
    multiply_chunk_rows<E>(of_outputs, operand, record.p);
    products_commit();
    // Read again, because operands of products in progress must not change.
    column_operands(scaled, shared_address(tile), warp, lane);
    scale_operands<E>(scaled, record.out, lane);
    products_wait<0>();
    add_other_half(e, group, i, warp, lane, shared);
    add_scaled(e, record.write, of_outputs, lane);
    to_operands<E>(operand, e);
    products_fence();
    multiply_chunk_rows<E>(e, operand, record.t);
    products_commit();
    update_state<E, kOwn>(ds, scaled, shared_address(rows.q + tiles * kTileBytes));
    products_commit();
    wait_for_other_half(i, warp, shared);
    store_state<kOwn>(state, shared.state[group], c.dstates + (image * kTiles + tiles) * kTileBytes, warp, lane);
    products_wait<1>();
    to_operands<E>(operand, e);
    negative_operands<E>(of_read, e, record.read, lane);
    products_fence();
    update_state<E, kOwn>(ds, of_read, shared_address(rows.k + tiles * kTileBytes));
    products_commit();
    if (tiles == 0) store_columns(operand, tile, c.dresiduals + image * kTileBytes, warp, lane);
    image -= c.p.shape.value_heads * c.slices;
    __syncwarp();
    if (lane == 0) shared.record_ring.release(i);
    products_wait<0>();
    __syncwarp();
    if (lane == 0) {
      shared.rows_ring.release(i);
      store_bulk_finish<kOwn>();
      store_release(&shared.written[group * kGroupWarps + warp], i);
    }
  }
  finish_states(walk.chunks, &shared.written[group * kGroupWarps + warp], thread % 32);
  write_state<kOwn>(ds, keys_from(c.p.dinitial_state, 64 * tiles), walk.n, walk.i_h, column, thread % 32);
}

template <int kTiles, int kGroups>
constexpr int threads() {
  constexpr int kOwners = kStateGroups<kTiles, kGroups>;
  return kGroupThreads * kOwners + (kOwners == 2 ? kGroupThreads : 64);
}

// The reverse sweep is launched first. It lets the forward sweep begin when `prepare` has ended, so that the forward
// sweep need not wait for its inputs. The last thread block of the forward sweep waits for the end of the reverse
// sweep, so that both are complete when the next kernel in the stream begins.
template <class E, int kTiles, int kGroups, bool kReverse, bool kChannel>
__global__ void __launch_bounds__(threads<kTiles, kGroups>(), 1)
    backward_kernel(const __grid_constant__ ChunkBackward<E> c, const __grid_constant__ RowMaps maps,
                    const __grid_constant__ CUtensorMap values, int parts, unsigned walks) {
  constexpr int kOwners = kStateGroups<kTiles, kGroups>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<BackwardShared<kTiles, kGroups, kChannel>*>(memory);
  if constexpr (!kReverse) let_next_kernel_begin();
  if (threadIdx.x < 32) {
    unsigned block = blockIdx.x;
    if (kReverse && gridDim.x > walks) {
      if (threadIdx.x == 0) block = claim_walk(c.claims, walks);
      block = __shfl_sync(0xffffffffU, block, 0);
    }
    Walk walk{};
    if (block < walks) walk = backward_walk(c, block, parts, 64 * kGroups, kReverse ? 0 : c.p.saved.interval);
    if (threadIdx.x == 0) {
      shared.idle = block >= walks;
      shared.walk = walk;
      shared.rows_ring.init(1, kOwners * kGroupWarps);
      shared.record_ring.init(1, kOwners * kGroupWarps);
      if constexpr (kDivided<kTiles>) shared.exchange.init();
      barrier_init(&shared.tail, 1);
      for (int& written : shared.written) written = 0;
      fence_async_proxy();
    }
  }
  __syncthreads();
  if (kReverse && shared.idle) return;
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if (group < kOwners) {
    if constexpr (kOwners == 2) take_registers<232>();
    if constexpr (kReverse) {
      wait_for_kernels();
      let_next_kernel_begin();
      walk_in_reverse(c, group, thread, shared);
    } else {
      walk_forwards(c, group, thread, shared);
    }
  } else {
    if constexpr (kOwners == 2) give_registers<40>();
    if (thread < 32) {
      copy_chunks<kReverse>(c, maps, values, thread, shared);
    } else if (thread < 64) {
      count_chunks<kReverse>(c, thread - 32, shared);
    }
  }
  if (!kReverse && blockIdx.x == gridDim.x - 1) wait_for_kernels();
}

template <int kTiles, int kGroups, bool kReverse, bool kChannel, class E>
void launch(const ChunkBackward<E>& c, const RowMaps& maps, const CUtensorMap& values, cudaStream_t stream) {
  constexpr int kBytes = sizeof(BackwardShared<kTiles, kGroups, kChannel>), kColumns = 64 * kGroups;
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = backward_kernel<E, kTiles, kGroups, kReverse, kChannel>;
  const DeltaShape& s = c.p.shape;
  const std::int64_t parts = (s.value_dim + kColumns - 1) / kColumns,
                     walks = kReverse ? s.sequences() : s.batch * s.chunks(c.p.saved.interval);
  const unsigned blocks = grid_of("chunk_bwd", walks * s.value_heads * parts), all = multiprocessors();
  const unsigned grid = kReverse && claims_walks(blocks, all) ? all : blocks;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  launch_early("chunk_bwd, sweeps", kernel, grid, threads<kTiles, kGroups>(), kBytes, stream, c, maps, values,
               static_cast<int>(parts), blocks);
}

template <int kTiles, int kGroups, bool kChannel, class E>
void launch_both(const ChunkBackward<E>& c, const RowMaps& maps, const CUtensorMap& dout, cudaStream_t stream) {
  launch<kTiles, kGroups, true, kChannel>(c, maps, dout, stream);
  launch<kTiles, kGroups, false, kChannel>(c, maps, maps.v, stream);
}

template <int kTiles, bool kChannel, class E>
void launch(const ChunkBackward<E>& c, const RowMaps& maps, const CUtensorMap& dout, cudaStream_t stream) {
  if (c.slices % 2 == 0 && c.p.shape.sequences() * c.p.shape.value_heads >= kManyHeads) {
    return launch_both<kTiles, 2, kChannel>(c, maps, dout, stream);
  }
  launch_both<kTiles, 1, kChannel>(c, maps, dout, stream);
}

}  // namespace

template <class E>
void launch_sweeps_sm90(const ChunkBackward<E>& c, const RowMaps& maps, const CUtensorMap& dout, cudaStream_t stream) {
  const bool narrow = c.p.shape.key_dim <= 64;
  if (divides_keys(c.p.shape)) return launch_both<4, 1, false>(c, maps, dout, stream);
  if (has_decayed_rows(c.p.rule)) {
    return narrow ? launch<1, true>(c, maps, dout, stream) : launch<2, true>(c, maps, dout, stream);
  }
  narrow ? launch<1, false>(c, maps, dout, stream) : launch<2, false>(c, maps, dout, stream);
}

template void launch_sweeps_sm90(const ChunkBackward<bfloat16>&, const RowMaps&, const CUtensorMap&, cudaStream_t);
template void launch_sweeps_sm90(const ChunkBackward<float16>&, const RowMaps&, const CUtensorMap&, cudaStream_t);

}  // namespace efla::gpu
