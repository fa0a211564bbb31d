// What the warps of a thread block of a sweep on Hopper share: the walk, shared memory, and the copies of rows and
// records (forward_sm90.cu, backward_sm90.cu).
#pragma once

#include <cstddef>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/chunk/prepare/prepare.cuh"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/ring.cuh"
#include "efla/cuda/common/tensor_map.h"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

inline constexpr int kGroupThreads = 128, kGroupWarps = 4;
inline constexpr int kStages = 3;
inline constexpr int kTokenStages = 4;                       // places of tokens in the fused kernel
inline constexpr int kKeysBarrier = 1, kOutputsBarrier = 2;  // ids of named barriers; group 1 has kOutputsBarrier + 1

// 64 value columns of a state with kTiles · 64 keys are in the registers of one warpgroup. If keys are divided, two
// warpgroups have half of the keys each. kOwnTiles: the tiles of keys per warpgroup. kStateGroups: warpgroups with
// states.
template <int kTiles>
inline constexpr bool kDivided = kTiles > 2;
template <int kTiles>
inline constexpr int kOwnTiles = kDivided<kTiles> ? kTiles / 2 : kTiles;
template <int kTiles, int kGroups>
inline constexpr int kStateGroups = kDivided<kTiles> ? 2 * kGroups : kGroups;

// A stage: the rows of a chunk. The outputs replace the values.
template <int kTiles, int kGroups, bool kChannel = false>
struct Rows {
  unsigned char k[kTiles * kTileBytes], q[kTiles * kTileBytes];
  unsigned char v[kGroups * kTileBytes];

  __device__ const unsigned char* written() const { return k; }
};

// With a gate per key channel k, w, q and decay are ScaledRows.
template <int kTiles, int kGroups>
struct alignas(1024) Rows<kTiles, kGroups, true> {
  unsigned char k[kTiles * kTileBytes], w[kTiles * kTileBytes], q[kTiles * kTileBytes];
  unsigned char v[kGroups * kTileBytes];
  alignas(128) float decay[64 * kTiles];

  __device__ const unsigned char* written() const { return w; }
};

// The states from which walks begin that apply no maps: the initial state, and zeros.
inline constexpr int kFromInitial = -1, kFromZeros = -2;

// The chunks of a segment of a sequence that a thread block walks, or of a whole sequence.
struct Walk {
  std::int64_t n, slot;
  int i_b, i_h, i_q, column, begin, end;  // 32 bits, because the coordinates of the copy engine have 32 bits
  int chunks, segment, segments, tail;    // tail: the chunk that the sequence does not fill, or −1
  int first_chunk, first_saved;  // numbers of the segment's first chunk and of the sequence's first saved state
  int maps;                      // maps to apply to the state after the first segment, or kFromInitial or kFromZeros
  int warm_up;                   // chunks at the walk's start without outputs
  int measured;                  // the chunk before which the state is measured for the next segment's warm-up, or −1
  bool outputs;                  // whether outputs are computed
  bool map;                      // whether the walk starts from the identity, with values of zero
  const void* beta;              // of the segment's first token, in the type of the elements
  const float* g;

  // Returns whether the outputs of a chunk, and the state saved before it, are written.
  __device__ bool has_outputs(int chunk) const { return chunk >= warm_up; }
  __device__ int start(int chunk) const { return begin + chunk * kChunkTokens; }
  __device__ int rows(int chunk) const { return min(end - start(chunk), kChunkTokens); }
};

// The exchange between the two warps that have the halves of the keys of the same value columns. Each sends up to 32
// elements per lane through two tiles of its half, in the warp's rows. `use` is the parity of the number of earlier
// uses.
struct Exchange {
  std::uint64_t sent[kGroupWarps], received[kGroupWarps];

  __device__ void init() {
    for (int warp = 0; warp < kGroupWarps; ++warp) {
      barrier_init(&sent[warp], 64);
      barrier_init(&received[warp], 64);
    }
  }
  __device__ static float4* at(unsigned char* tiles, int i, int warp, int lane) {
    return reinterpret_cast<float4*>(tiles + i / 4 * kTileBytes + 2048 * warp + 512 * (i % 4)) + lane;
  }

  // Sends x through this half's tiles, after the last use has been received.
  template <int kCount>
  __device__ __forceinline__ void send(const float (&x)[kCount], unsigned char* tiles, unsigned use, int warp,
                                       int lane) {
    barrier_wait(&received[warp], use ^ 1U);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      *at(tiles, i, warp, lane) = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
    barrier_arrive(&sent[warp]);
  }
  // Adds what the other half has sent through its tiles to x. The caller then calls release.
  template <int kCount>
  __device__ __forceinline__ void add_received(float (&x)[kCount], unsigned char* tiles, unsigned use, int warp,
                                               int lane) {
    barrier_wait(&sent[warp], use);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 other = *at(tiles, i, warp, lane);
      x[4 * i] += other.x;
      x[4 * i + 1] += other.y;
      x[4 * i + 2] += other.z;
      x[4 * i + 3] += other.w;
    }
  }
  // Says that this half has received. The next send waits until both halves have said so.
  __device__ __forceinline__ void release(int warp) { barrier_arrive(&received[warp]); }
  __device__ __forceinline__ void wait_for_release(unsigned use, int warp) { barrier_wait(&received[warp], use); }
};

// A record at a multiple of 1024 bytes, because the swizzle of the tensor cores depends on the address.
struct alignas(1024) RecordAt : ChunkRecord {};

// The shared memory of a thread block.
template <int kTiles, int kGroups, bool kFused, bool kChannel>
struct Shared {
  // Three stages would exceed the shared memory with a gate per key channel and two groups, and with divided keys.
  static constexpr int kStages = (kChannel && kGroups == 2) || kDivided<kTiles> ? 2 : gpu::kStages,
                       kRecords = kFused && kGroups == 2 ? 2 : kStages;
  alignas(1024) Rows<kTiles, kGroups, kChannel> rows[kStages];
  RecordAt record[kRecords];
  unsigned char exchanged[kDivided<kTiles> ? 2 : 0][2 * kTileBytes];
  PrepareScratch scratch[kFused ? kRecords : 0];
  Token tokens[kFused ? kTokenStages : 0][kChunkTokens];
  Walk walk;
  Ring<kStages> rows_ring;  // chunk c has stage c of both rings
  Ring<kRecords> record_ring;
  std::uint64_t tail, tail_full;  // of a chunk that the sequence does not fill: copied; zeroed
  StageBarriers<kFused ? kTokenStages : 0> tokens_full;
  StageBarriers<kFused ? kRecords : 0> vectors_full, diagonal_full;
  Ring<1> map_ring;  // the map of segment i is item i - 1
  Exchange exchange;

  // Returns where the map of an earlier segment lies: in the place of all stages but the first chunk's.
  __device__ SegmentMap<kTiles>& map() {
    static_assert(sizeof(SegmentMap<kTiles>) <= (kStages - 1) * sizeof(rows[0]));
    return *reinterpret_cast<SegmentMap<kTiles>*>(&rows[1]);
  }
};

// Returns the number of thread blocks for `size` columns, with `columns` columns per block.
constexpr int slices_of(std::int64_t size, int columns) { return static_cast<int>((size + columns - 1) / columns); }
// Return the thread blocks per sequence and value head of a launch, with `columns` value columns per block.
// sweep_blocks: one per slice and segment; with several segments the first segment is left to the launch of the maps.
// map_blocks: slices of 64 columns of the first segment's outputs, and per segment between the first and the last
// slices of N and of M.
template <class E>
constexpr int sweep_blocks(const ChunkProblem<E>& c, int columns) {
  return slices_of(c.p.shape.value_dim, columns) * (c.segments - (c.segments > 1 ? 1 : 0));
}
template <class E>
constexpr int map_blocks(const ChunkProblem<E>& c, int columns) {
  const int slices = slices_of(c.p.shape.value_dim, columns) + slices_of(c.p.shape.key_dim, columns);
  return slices_of(c.p.shape.value_dim, 64) + (c.segments - 2) * slices;
}

// Makes the walk that of the chunks of a segment of its sequence, which is cut into `segments`.
template <class E>
__device__ __forceinline__ void place(Walk& walk, const ChunkProblem<E>& c, int segment, int segments) {
  const Sequence sequence = sequence_of(c.p, walk.n);
  const std::int64_t chunks = (sequence.end - sequence.begin + kChunkTokens - 1) / kChunkTokens;
  const std::int64_t length = segments > 1 ? segment_chunks(chunks, segments) : chunks, first = segment * length;
  const std::int64_t begin = sequence.begin + first * kChunkTokens;
  walk.segment = segment;
  walk.segments = segments;
  walk.i_b = static_cast<int>(sequence.i_b);
  walk.begin = static_cast<int>(begin);
  walk.end = static_cast<int>(min(sequence.end, begin + length * kChunkTokens));
  walk.beta = c.p.beta.at(sequence.i_b, begin, walk.i_h);
  walk.g = c.p.g ? c.p.g.at(sequence.i_b, begin, walk.i_h) : nullptr;
  walk.slot = first_slot(c, walk.n) + first;
  walk.first_chunk = static_cast<int>(first);
  walk.first_saved = c.p.chunk_states ? static_cast<int>(sequence.first_chunk) : 0;
  walk.chunks = static_cast<int>(max(std::int64_t{0}, min(length, chunks - first)));
  walk.tail = walk.chunks > 0 && walk.rows(walk.chunks - 1) < kChunkTokens ? walk.chunks - 1 : -1;
  walk.maps = segment - 1;  // kFromInitial for the first segment
  walk.warm_up = 0;
  walk.measured = -1;
}

// Returns the walk of this thread block. kGroups and kOutputs as in sweep_kernel.
template <int kGroups, bool kOutputs, class E>
__device__ __forceinline__ Walk walk_of(const ChunkProblem<E>& c) {
  constexpr int kColumns = 64 * kGroups;
  Walk walk;
  const int slices = slices_of(c.p.shape.value_dim, kColumns);
  const int blocks = kOutputs ? sweep_blocks(c, kColumns) : map_blocks(c, kColumns);
  const unsigned head = blockIdx.x / blocks, heads = static_cast<unsigned>(c.p.shape.value_heads);
  int part = static_cast<int>(blockIdx.x % blocks);
  walk.i_h = static_cast<int>(head % heads);
  walk.i_q = walk.i_h / static_cast<int>(heads / static_cast<unsigned>(c.p.shape.heads));
  walk.n = head / heads;
  walk.map = false;
  if constexpr (kOutputs) {
    walk.outputs = true;
    walk.segment = part / slices + (c.segments > 1 ? 1 : 0);
    walk.column = part % slices * kColumns;
  } else {
    const int first = slices_of(c.p.shape.value_dim, 64), all = slices + slices_of(c.p.shape.key_dim, kColumns);
    walk.outputs = part < first;
    part -= walk.outputs ? 0 : first;
    walk.segment = walk.outputs ? 0 : part / all + 1;
    part = walk.outputs ? part : part % all;
    walk.map = !walk.outputs && part >= slices;
    walk.column = walk.outputs ? 64 * part : (walk.map ? part - slices : part) * kColumns;
  }
  place(walk, c, walk.segment, c.segments);
  return walk;
}

// Starts the copies of a chunk's keys, of its queries if kQueries is set, and of its values or dO (`values`) if
// with_values is set. `full` counts their bytes. Run by one thread.
template <bool kQueries, int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void copy_chunk_rows(const ChunkProblem<E>& c, const RowMaps& maps,
                                                const CUtensorMap& values, bool with_values, const Walk& walk,
                                                int chunk, Rows<kTiles, kGroups, kChannel>& rows, std::uint64_t* full) {
  const int t = walk.start(chunk), value_bytes = with_values ? kGroups * kTileBytes : 0;
  if constexpr (kChannel) {
    constexpr int kScaled = kTiles * kTileBytes * (kQueries ? 3 : 2);
    const auto& from =
        reinterpret_cast<const ScaledRows<kTiles>*>(c.scaled)[(walk.slot + chunk) * c.p.shape.value_heads + walk.i_h];
    barrier_expect(full, kScaled + static_cast<int>(sizeof(rows.decay)) + value_bytes);
    load_bulk(rows.k, from.k, kScaled, full);
    load_bulk(rows.decay, from.decay, sizeof(rows.decay), full);
  } else {
    barrier_expect(full, kTiles * kTileBytes * (kQueries ? 2 : 1) + value_bytes);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      load_tile(rows.k + tile * kTileBytes, &maps.k, 64 * tile, walk.i_q, t, walk.i_b, full);
      if constexpr (kQueries) {
        load_tile(rows.q + tile * kTileBytes, &maps.q, 64 * tile, walk.i_q, t, walk.i_b, full);
      }
    }
  }
  if (!with_values) return;
#pragma unroll
  for (int tile = 0; tile < kGroups; ++tile) {
    load_tile(rows.v + tile * kTileBytes, &values, walk.column + 64 * tile, walk.i_h, t, walk.i_b, full);
  }
}

// Waits until the stage of item i is free and starts the copy of a record, without P unless kWhole is set. Run by one
// thread.
template <bool kWhole, int kRecords>
__device__ __forceinline__ void copy_record(const ChunkRecord& from, ChunkRecord& to, Ring<kRecords>& ring, int i) {
  if constexpr (kWhole) {
    load_bulk(&to, &from, sizeof(ChunkRecord), ring.start(i, sizeof(ChunkRecord)));
  } else {
    constexpr int kVectors = sizeof(ChunkRecord) - offsetof(ChunkRecord, b);
    std::uint64_t* const full = ring.start(i, kTileBytes + kVectors);
    load_bulk(to.t, from.t, kTileBytes, full);
    load_bulk(to.b, from.b, kVectors, full);
  }
}

// Waits until the stage of a chunk is free and starts the copies of the chunk's rows. Run by one thread.
template <bool kOutputs, int kTiles, int kGroups, bool kFused, bool kChannel, class E>
__device__ __forceinline__ void start_rows(const ChunkProblem<E>& c, const RowMaps& maps, int chunk,
                                           Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  const Walk& walk = shared.walk;
  if (chunk >= walk.chunks) return;
  auto& rows = shared.rows[chunk % shared.kStages];
  shared.rows_ring.wait_free(chunk);
  copy_chunk_rows<kOutputs>(c, maps, maps.v, kOutputs || !walk.map, walk, chunk, rows,
                            chunk == walk.tail ? &shared.tail : shared.rows_ring.full.of(chunk));
}

// Zeroes the rows of keys and values after the sequence's end, which belong to another sequence. Run by one warp.
template <int kTiles, int kGroups, bool kFused, bool kChannel>
__device__ __forceinline__ void finish_tail(int lane, Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  const int chunk = shared.walk.chunks - 1, first = shared.walk.rows(chunk), stage = chunk % shared.kStages;
  auto& rows = shared.rows[stage];
  barrier_wait(&shared.tail, 0);
  for (int tile = 0; tile < kTiles; ++tile) clear_rows(rows.k + tile * kTileBytes, first, lane, 32);
  for (int tile = 0; tile < kGroups; ++tile) clear_rows(rows.v + tile * kTileBytes, first, lane, 32);
  fence_async_proxy();
  barrier_arrive(&shared.tail_full);
}

// Returns whether a chunk of the walk is the one that the sequence does not fill.
template <int kTiles, int kGroups, bool kFused, bool kChannel>
__device__ __forceinline__ bool is_tail(int chunk, const Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  return chunk == shared.walk.tail;
}

// Waits for the rows of a chunk. `tail` is the tail of the walk.
template <int kTiles, int kGroups, bool kFused, bool kChannel>
__device__ __forceinline__ void wait_for_rows(int chunk, int tail, Shared<kTiles, kGroups, kFused, kChannel>& shared) {
  if (chunk == tail) {
    barrier_wait(&shared.tail_full, 0);
  } else {
    shared.rows_ring.wait_full(chunk);
  }
}

// Returns the map of a segment, which is neither the first nor the last of its sequence.
template <int kTiles, class E>
__device__ __forceinline__ SegmentMap<kTiles>* segment_map(const ChunkProblem<E>& c, const Walk& walk, int segment) {
  const std::int64_t head = walk.n * c.p.shape.value_heads + walk.i_h;
  return reinterpret_cast<SegmentMap<kTiles>*>(c.segment_maps) + head * (c.segments - 2) + segment - 1;
}

// Copies the maps that the walk applies, one after the other. Run by one thread.
template <int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void copy_maps(const ChunkProblem<E>& c, Shared<kTiles, kGroups, false, kChannel>& shared) {
  const int last = shared.walk.maps;
  for (int segment = 1; segment <= last; ++segment) {
    std::uint64_t* const full = shared.map_ring.full.of(segment - 1);
    barrier_expect(full, sizeof(SegmentMap<kTiles>));
    load_bulk(&shared.map(), segment_map<kTiles>(c, shared.walk, segment), sizeof(SegmentMap<kTiles>), full);
    shared.map_ring.free.wait(segment - 1);
  }
}

// Runs the warp that copies rows and records, without queries and P for chunks without outputs. Without a gate per key
// channel the rows of the first chunk are copied before the previous kernels have ended, because no kernel of the
// forward writes q, k or v.
template <bool kOutputs, bool kTruncates, int kTiles, int kGroups, bool kChannel, class E>
__device__ __forceinline__ void copy_chunks(const ChunkProblem<E>& c, const RowMaps& maps, int lane,
                                            Shared<kTiles, kGroups, false, kChannel>& shared) {
  const Walk& walk = shared.walk;
  constexpr int kRecords = Shared<kTiles, kGroups, false, kChannel>::kRecords;
  const auto start_record = [&](int chunk) {
    if (chunk >= walk.chunks) return;
    const ChunkRecord& from = c.records[(walk.slot + chunk) * c.p.shape.value_heads + walk.i_h];
    ChunkRecord& to = shared.record[chunk % kRecords];
    if (kTruncates && !walk.has_outputs(chunk)) return copy_record<false>(from, to, shared.record_ring, chunk);
    copy_record<kOutputs>(from, to, shared.record_ring, chunk);
  };
  const auto start_chunk_rows = [&](int chunk) {
    if (kTruncates && !walk.has_outputs(chunk)) return start_rows<false>(c, maps, chunk, shared);
    start_rows<kOutputs>(c, maps, chunk, shared);
  };
  if (lane == 0) {
    if constexpr (!kChannel) start_chunk_rows(0);
    wait_for_kernels();
    if constexpr (kChannel) start_chunk_rows(0);
    start_record(0);
    if constexpr (kOutputs && !kDivided<kTiles>) copy_maps(c, shared);
#pragma unroll 1
    for (int chunk = 1; chunk < walk.chunks; ++chunk) {
      start_chunk_rows(chunk);
      start_record(chunk);
    }
  }
  __syncwarp();
  if (walk.tail >= 0) finish_tail(lane, shared);
}

}  // namespace efla::gpu
