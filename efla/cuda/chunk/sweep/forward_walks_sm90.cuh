// The warpgroups of the forward sweep on Hopper GPUs that carry the state through a walk: with outputs, with divided
// keys, and for the maps of segments. forward_sm90.cu explains their thread blocks.
#pragma once

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/chunk/state.cuh"
#include "efla/cuda/chunk/sweep/truncation_sm90.cuh"
#include "efla/cuda/chunk/sweep/walk_sm90.cuh"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/tile.cuh"
#include "efla/cuda/common/wgmma.cuh"

namespace efla::gpu {

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
// first segment S ← M S + N once per map of the walk, or zeros for a walk that begins from zeros. S and M are the sum
// of two matrices of elements, and the product of both lower matrices is left out.
template <bool kTruncates, int kTiles, int kGroups, bool kFused, bool kChannel, class E>
__device__ __forceinline__ void read_state_before(float (&s)[32 * kTiles], const ChunkProblem<E>& c,
                                                  std::int64_t column, int lane,
                                                  Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  const Walk& walk = shared.walk;
  if (kFused || walk.maps == kFromInitial)
    return read_state<kTiles>(s, state_of(c.p.initial_state, walk), 0, 0, column, lane);
  if constexpr (!kFused) {
    if constexpr (kTruncates) {
      if (walk.maps == kFromZeros) return set_zero(s);
    }
    const auto read = [&](int segment) {
      read_state<kTiles>(s, state_of(c.segment_states, walk, c.segments - 1, segment), 0, 0, column, lane);
    };
    read(0);
#pragma unroll 1
    for (int segment = 1; segment <= walk.maps; ++segment) {
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
  if (walk.segment == walk.segments - 1) return state_of(c.p.final_state, walk);
  return walk.segment == 0 && walk.segments == c.segments ? state_of(c.segment_states, walk, c.segments - 1, 0)
                                                          : View<float, 4>{};
}

// Converts U, which is in e, to operands u, and write∘U to operands `written`. Leaves write∘U in e.
template <class E>
__device__ __forceinline__ void make_write_operands(std::uint32_t (&u)[4][4], std::uint32_t (&written)[4][4],
                                                    float (&e)[32], const ChunkRecord& record, int lane) {
  to_operands<E>(u, e);
  scale_columns(e, record.write, lane);
  to_operands<E>(written, e);
}

// Copies a warpgroup's outputs of a chunk from a tile to memory, by the copy engine. The warps copy the outputs of a
// chunk that the sequence does not fill, because the rows after it belong to another sequence. `tail` is this chunk.
template <class E>
__device__ __forceinline__ void store_outputs(const ChunkProblem<E>& c, const CUtensorMap& outputs, const Walk& walk,
                                              int tail, int chunk, const unsigned char* tile, int group, int thread) {
  if (chunk == tail) {
    const int own = opaque(thread);  // opaque, because registers are scarce for addresses kept until here
    OutputColumns<E>(c.p.o, walk, walk.column + 64 * group, chunk, warp_of(own), own % 32).copy(tile, walk.rows(chunk));
    return;
  }
  fence_async_proxy();
  if (group == 0) {
    named_barrier(kOutputsBarrier, kGroupThreads);
  } else {
    named_barrier(kOutputsBarrier + 1, kGroupThreads);
  }
  if (thread == 0) store_tile(&outputs, tile, walk.column + 64 * group, walk.i_h, walk.start(chunk), walk.i_b);
}

// Writes a warpgroup's part of the state after the walk.
template <int kTiles, class E>
__device__ __forceinline__ void finish_state(float (&s)[32 * kTiles], const ChunkProblem<E>& c, const Walk& walk,
                                             int group, int thread) {
  const int own = opaque(thread);
  write_state<kTiles>(s, state_after(c, walk), 0, 0, walk.column + 64 * group + 16 * warp_of(own), own % 32);
}

// Carries a warpgroup's 64 columns `group` of the state s through the first `chunks` chunks of a walk, without outputs.
template <int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void advance(float (&s)[32 * kTiles], const ChunkProblem<E>&, int chunks, int group,
                                        int warp, int lane, Shared<kTiles, kGroups, false, kChannel>& shared) {
  constexpr int kStages = Shared<kTiles, kGroups, false, kChannel>::kStages,
                kRecords = Shared<kTiles, kGroups, false, kChannel>::kRecords;
  const int tail = shared.walk.tail;
  float e[32];
  leave_undefined(e);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    auto& rows = shared.rows[chunk % kStages];
    const ChunkRecord& record = shared.record[chunk % kRecords];
    std::uint32_t operand[4 * kTiles][4], written[4][4];
    to_operands<E>(operand, s);
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
    to_operands<E>(written, e);
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
}

// Computes a warpgroup's part of the state before the first chunk with outputs.
template <bool kTruncates, int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void begin_state(float (&s)[32 * kTiles], const ChunkProblem<E>& c, int group, int thread,
                                            Shared<kTiles, kGroups, false, kChannel>& shared) {
  const int warp = warp_of(thread), lane = thread % 32;
  read_state_before<kTruncates>(s, c, shared.walk.column + 64 * group + 16 * warp, lane, shared);
  if constexpr (kTruncates) advance(s, c, shared.walk.warm_up, group, warp, lane, shared);
}

// Runs the warpgroup of a thread block with 64 value columns, which carries the state through the walk and computes
// outputs. The product P U of a chunk is computed while the residual of the next chunk is computed. The outputs of a
// chunk replace the values of the next chunk, from where the copy engine writes them.
template <bool kTruncates, int kTiles, bool kChannel, class E>
__device__ __forceinline__ void walk_outputs(const ChunkProblem<E>& c, const CUtensorMap& outputs, int group,
                                             int thread, Shared<kTiles, 1, false, kChannel>& shared) {
  using Memory = Shared<kTiles, 1, false, kChannel>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords;
  const Walk& walk = shared.walk;
  const int tail = walk.tail;
  float s[32 * kTiles], e[32], o[32];
  std::uint32_t u[4][4] = {};
  begin_state<kTruncates>(s, c, group, opaque(thread), shared);
  // opaque, because registers are scarce for addresses of warm-ups kept until here
  const int own = opaque(thread), warp = warp_of(own), lane = own % 32;
  const std::int64_t column = walk.column + 64 * group;
  leave_undefined(e);
  leave_undefined(o);
  int chunk = kTruncates ? walk.warm_up : 0;
#pragma unroll 1
  while (chunk < walk.chunks) {
    const int end = kTruncates && chunk < walk.measured ? walk.measured : walk.chunks;
    if constexpr (kTruncates) store_peaks<kTiles>(s, c, walk, chunk, column + 16 * warp, lane);
#pragma unroll 1
    for (; chunk < end; ++chunk) {
      auto& rows = shared.rows[chunk % kStages];
      const ChunkRecord& record = shared.record[chunk % kRecords];
      unsigned char* tile = rows.v + group * kTileBytes;
      save_state<kTiles>(s, c.p, walk.i_b, walk.i_h, walk.first_saved, walk.first_chunk + chunk, column + 16 * warp,
                         lane);
      std::uint32_t operand[4 * kTiles][4], written[4][4];
      to_operands<E>(operand, s);
      wait_for_rows(chunk, tail, shared);
      products_fence();
      multiply_state<E, kTiles>(e, operand, shared_address(rows.k));
      products_commit();
      // P U of the previous chunk; for the first chunk the result is overwritten.
      multiply_chunk<E>(o, u, shared.record[(chunk + kRecords - 1) % kRecords].p, true);
      products_commit();
      shared.record_ring.wait_full(chunk);
      products_wait<1>();
      residual<E>(written, e, shared_address(tile), record, warp, lane);
      products_fence();
      multiply_chunk<E>(e, written, record.t, false);
      products_commit();
      products_wait<1>();
      if (chunk > (kTruncates ? walk.warm_up : 0)) {
        __syncwarp();
        if (lane == 0) shared.record_ring.release(chunk - 1);
        put_outputs<E>(o, tile, warp, lane);
        store_outputs(c, outputs, walk, tail, chunk - 1, tile, group, thread);
      }
      products_fence();
      multiply_state<E, kTiles>(o, operand, shared_address(rows.q));
      products_commit();
      products_wait<1>();
      make_write_operands<E>(u, written, e, record, lane);
      decay_state(s, rows, record, lane);
      products_fence();
      update_state<E, kTiles>(s, written, shared_address(rows.written()));
      products_commit();
      products_wait<1>();
      scale_columns(o, record.out, lane);
      finish_products(s);
      store_bulk_wait();
      __syncwarp();
      if (lane == 0) shared.rows_ring.release(chunk);
    }
  }
  if (walk.chunks > 0) {
    const int chunk = walk.chunks - 1;
    unsigned char* tile = shared.rows[chunk % kStages].v + group * kTileBytes;
    products_fence();
    multiply_chunk<E>(o, u, shared.record[chunk % kRecords].p, true);
    products_commit();
    products_wait<0>();
    named_barrier(kOutputsBarrier, kGroupThreads);  // the first thread has waited for the copy from this tile
    put_outputs<E>(o, tile, warp, lane);
    store_outputs(c, outputs, walk, tail, chunk, tile, group, thread);
  }
  store_bulk_wait();
  finish_state<kTiles>(s, c, walk, group, thread);
}

// Runs warpgroup `group` of another thread block, which carries 64 value columns of the state through the walk and
// computes outputs.
//
// kStored: the copy engine writes the outputs from the tile in which the values were. It does so in the fused kernel
// with two warpgroups of the state. In the other two kernels the warps write the outputs. The fused kernel with one
// warpgroup does without the copy engine, because chunks would wait for records, and records for tiles.
template <bool kTruncates, int kTiles, int kGroups, bool kFused, bool kChannel, class E>
__device__ __forceinline__ void walk_outputs(const ChunkProblem<E>& c, const CUtensorMap& outputs, int group,
                                             int thread, Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  using Memory = Shared<kTiles, kGroups, kFused, kChannel>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords;
  constexpr bool kStored = kFused && kGroups == 2;
  const int warp = warp_of(thread), lane = thread % 32;
  const Walk& walk = shared.walk;
  const int tail = walk.tail;
  const std::int64_t column = walk.column + 64 * group;
  float s[32 * kTiles], e[32], o[32];
  std::uint32_t u[4][4] = {};
  read_state_before<kTruncates>(s, c, column + 16 * warp, lane, shared);
  const int first = kTruncates ? walk.warm_up : 0;
  if constexpr (kTruncates) advance(s, c, first, group, warp, lane, shared);
  OutputColumns<E> columns(c.p.o, walk, column, first, warp, lane);
  leave_undefined(e);
  leave_undefined(o);
#pragma unroll 1
  for (int chunk = first; chunk < walk.chunks; ++chunk) {
    auto& rows = shared.rows[chunk % kStages];
    const ChunkRecord& record = shared.record[chunk % kRecords];
    unsigned char* tile = rows.v + group * kTileBytes;
    save_state<kTiles>(s, c.p, walk.i_b, walk.i_h, walk.first_saved, walk.first_chunk + chunk, column + 16 * warp,
                       lane);
    std::uint32_t operand[4 * kTiles][4], written[4][4];
    to_operands<E>(operand, s);
    wait_for_rows(chunk, tail, shared);
    products_fence();
    multiply_state<E, kTiles>(e, operand, shared_address(rows.k));
    products_commit();
    multiply_state<E, kTiles>(o, operand, shared_address(rows.q));
    products_commit();
    if (kStored && chunk > 0) {  // by now the copy engine has read the previous chunk's outputs
      store_bulk_wait();
      shared.rows_ring.release(chunk - 1);
    }
    shared.record_ring.wait_full(chunk);
    products_wait<0>();  // with two groups one hides the wait of the other, and registers are scarce
    residual<E>(written, e, shared_address(tile), record, warp, lane);
    products_fence();
    multiply_chunk<E>(e, written, record.t, false);
    products_commit();
    products_wait<0>();
    make_write_operands<E>(u, written, e, record, lane);
    decay_state(s, rows, record, lane);
    products_fence();
    update_state<E, kTiles>(s, written, shared_address(rows.written()));
    products_commit();
    scale_columns(o, record.out, lane);
    products_fence();
    multiply_chunk<E>(o, u, record.p, true);
    products_commit();
    finish_products(s);
    __syncwarp();
    if (kFused || lane == 0) shared.record_ring.release(chunk);
    put_outputs<E>(o, tile, warp, lane);
    if constexpr (kStored) {
      store_outputs(c, outputs, walk, tail, chunk, tile, group, thread);
    } else {
      columns.copy(tile, walk.rows(chunk));
    }
    if constexpr (!kStored) columns.to += kChunkTokens * columns.stride;
    __syncwarp();
    if (kFused ? !kStored : lane == 0) shared.rows_ring.release(chunk);
  }
  if constexpr (kStored) store_bulk_wait();
  finish_state<kTiles>(s, c, walk, group, thread);
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
    to_operands<E>(operand, s);
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
  const int warp = warp_of(thread), lane = thread % 32;
  const Walk& walk = shared.walk;
  const std::int64_t column = walk.column + 64 * group + 16 * warp;
  float s[32 * kTiles];
#pragma unroll
  for (float& x : s) x = 0;
  if (walk.map) set_identity<kTiles>(s, column, lane);
  advance(s, c, walk.chunks, group, warp, lane, shared);
  if (walk.map) {
    write_map<E>(s, *segment_map<kTiles>(c, walk, walk.segment), static_cast<int>(column), lane);
  } else {
    write_state<kTiles>(s, state_of(c.segment_states, walk, c.segments - 1, walk.segment), 0, 0, column, lane);
  }
}

}  // namespace efla::gpu
