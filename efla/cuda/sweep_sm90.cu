// The sweep over the state on Hopper GPUs: products by wgmma.
//
// One thread block per sequence, value head and slice of 64 · kGroups value columns walks the chunks of the sequence.
// Its first warpgroup copies the chunk's rows to shared memory and brings the chunk's record: where kFused is set it
// computes the record there (prepare.cuh), so that neither T nor P travel through memory, otherwise it copies what the
// kernel `prepare` wrote. The other warpgroups keep 64 rows each of the transposed state Sᵀ [V, K] in registers, as in
// sweep_portable.cu.
//
// Rows of q, k, v and o are aligned to 16 bytes. Chunk c has stage c % kStages for its rows and record c % kRecords.
// Barriers say that rows or a record are there, and that every warp that reads them has finished.
#include "efla/cuda/chunk.h"
#include "efla/cuda/error.h"
#include "efla/cuda/launch.h"
#include "efla/cuda/prepare.cuh"
#include "efla/cuda/state.cuh"
#include "efla/cuda/tile.cuh"
#include "efla/cuda/wgmma.cuh"

namespace efla::gpu {
namespace {

constexpr int kGroupThreads = 128, kGroupWarps = 4;
constexpr int kStages = 3;
constexpr int kProducerBarrier = 1, kStoreBarrier = 2;  // ids of named barriers; state group g has kStoreBarrier + g

template <int kTiles, int kGroups>
struct Rows {
  unsigned char k[kTiles * kTileBytes], q[kTiles * kTileBytes];
  unsigned char v[kGroups * kTileBytes];  // afterwards the outputs
};

// The chunks of one sequence that a thread block walks.
struct Walk {
  std::int64_t n, i_b, begin, end, slot, i_h, column;
  int chunks;

  __device__ std::int64_t start(int chunk) const { return begin + static_cast<std::int64_t>(chunk) * kChunkTokens; }
  __device__ int rows(int chunk) const { return static_cast<int>(min(end - start(chunk), std::int64_t{kChunkTokens})); }
  __device__ ChunkAt at(int chunk) const { return {n, i_b, begin, end, start(chunk), rows(chunk)}; }
};

// T and P at addresses of which the swizzle of the tensor cores is a function.
struct alignas(1024) RecordAt : ChunkRecord {};

template <int kTiles, int kGroups, bool kFused>
struct Shared {
  static constexpr int kRecords = kFused ? 2 : kStages;
  alignas(1024) Rows<kTiles, kGroups> rows[kStages];
  RecordAt record[kRecords];
  PrepareScratch scratch[kFused ? 1 : 0];
  Walk walk;
  std::uint64_t rows_full[kStages], rows_free[kStages], record_full[kRecords], record_free[kRecords];
};

// What the thread block walks.
template <int kGroups>
__device__ __forceinline__ Walk walk_of(const ChunkProblem& c, int slices) {
  Walk walk;
  walk.column = static_cast<std::int64_t>(blockIdx.x % slices) * 64 * kGroups;
  walk.i_h = blockIdx.x / slices % c.p.shape.value_heads;
  walk.n = blockIdx.x / slices / c.p.shape.value_heads;
  const Sequence sequence = sequence_of(c.p, walk.n);
  walk.i_b = sequence.i_b;
  walk.begin = sequence.begin;
  walk.end = sequence.end;
  walk.slot = first_slot(c, walk.n);
  walk.chunks = static_cast<int>((sequence.end - sequence.begin + kChunkTokens - 1) / kChunkTokens);
  return walk;
}

// Which use of its stage a chunk is, as the parity that a wait for that use takes.
__device__ __forceinline__ unsigned parity(int chunk, int stages) { return static_cast<unsigned>(chunk / stages) & 1U; }

template <int kTiles, int kGroups, bool kFused>
__device__ __forceinline__ void start_rows(const ChunkProblem& c, int chunk, int thread,
                                           Shared<kTiles, kGroups, kFused>& shared) {
  const Walk& walk = shared.walk;
  const ChunkAt at = walk.at(chunk);
  Rows<kTiles, kGroups>& rows = shared.rows[chunk % kStages];
  const std::int64_t i_q = walk.i_h / c.p.shape.group();
  load_rows<kTiles, kGroupThreads, true>(rows.k, c.p.k, at.i_b, at.start, at.rows, i_q, 0, true, thread);
  load_rows<kTiles, kGroupThreads, true>(rows.q, c.p.q, at.i_b, at.start, at.rows, i_q, 0, true, thread);
  load_rows<kGroups, kGroupThreads, true>(rows.v, c.p.v, at.i_b, at.start, at.rows, walk.i_h, walk.column, true,
                                          thread);
}

// Returns x as a value of which the compiler knows nothing, so that what is computed from it is computed where it is
// used, instead of before a loop, where it would take registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The first warpgroup.
template <int kTiles, int kGroups, bool kFused>
__device__ __forceinline__ void produce(const ChunkProblem& c, int own_thread,
                                        Shared<kTiles, kGroups, kFused>& shared) {
  const Walk& walk = shared.walk;
  constexpr int kRecords = Shared<kTiles, kGroups, kFused>::kRecords;
  const auto sync = [] { named_barrier(kProducerBarrier, kGroupThreads); };
  if constexpr (kFused) {
    for (auto& record : shared.record) clear_upper_blocks(record, own_thread);
  }
  const auto start_copies = [&](int chunk) {
    if (chunk >= walk.chunks) return;
    const int thread = opaque(own_thread);
    barrier_wait(&shared.rows_free[chunk % kStages], parity(chunk, kStages) ^ 1U);
    start_rows(c, chunk, thread, shared);
    if constexpr (!kFused) {
      barrier_wait(&shared.record_free[chunk % kRecords], parity(chunk, kRecords) ^ 1U);
      const auto* from =
          reinterpret_cast<const unsigned char*>(&c.records[(walk.slot + chunk) * c.p.shape.value_heads + walk.i_h]);
      const std::uint32_t to = shared_address(&shared.record[chunk % kRecords]);
      for (int byte = 16 * thread; byte < static_cast<int>(sizeof(ChunkRecord)); byte += 16 * kGroupThreads) {
        copy_async_16(to + byte, from + byte, 16);
      }
    }
  };
  for (int chunk = 0; chunk < 2; ++chunk) {
    start_copies(chunk);
    copy_async_commit();
  }
  const auto tokens_of = [&](int chunk) {
    return kFused && chunk < walk.chunks ? read_tokens(c.p, walk.at(chunk), walk.i_h, own_thread % 32) : TokenPair{};
  };
  TokenPair tokens = tokens_of(0);
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int thread = opaque(own_thread), warp = thread / 32, lane = thread % 32;
    const TokenPair next = tokens_of(chunk + 1);
    copy_async_wait<1>();
    fence_for_products();
    sync();
    if (thread == 0) barrier_arrive(&shared.rows_full[chunk % kStages]);
    if constexpr (kFused) {
      Rows<kTiles, kGroups>& rows = shared.rows[chunk % kStages];
      ChunkRecord& record = shared.record[chunk % kRecords];
      BlockProducts products;
      block_products<kTiles>(shared_address(rows.k), shared_address(rows.q), c.p.rule.qk_l2norm, warp, lane, products,
                             shared.scratch[0]);
      barrier_wait(&shared.record_free[chunk % kRecords], parity(chunk, kRecords) ^ 1U);
      sync();
      fill_record(products, c.p.rule, c.scale, tokens, thread, shared.scratch[0], record, sync);
      fence_for_products();
      sync();
    }
    if (thread == 0) barrier_arrive(&shared.record_full[chunk % kRecords]);
    tokens = next;
    start_copies(chunk + 2);
    copy_async_commit();
  }
}

template <int kTiles>
__device__ __forceinline__ void multiply_state(float (&d)[32], const std::uint32_t (&s)[4 * kTiles][4],
                                               std::uint32_t tiles) {
  const std::uint64_t operand = row_operand(tiles);
#pragma unroll
  for (int step = 0; step < 4 * kTiles; ++step) {
    multiply_64<false>(d, s[step], operand + step / 4 * (kTileBytes >> 4) + step % 4 * kRowStep, step > 0);
  }
}

// Writes `rows` rows of outputs from the tile of a state group; `to` is the thread's piece of the first row.
__device__ __forceinline__ void store_tile(bfloat16* to, std::int64_t stride, int rows, int thread,
                                           const unsigned char* tile) {
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int row = thread / 8 + 16 * pass;
    if (row >= rows) break;
    *reinterpret_cast<uint4*>(to + 16 * pass * stride) =
        *reinterpret_cast<const uint4*>(tile + piece_offset(row, thread % 8));
  }
}

// A warpgroup of the state, number `group`.
template <int kTiles, int kGroups, bool kFused>
__device__ __forceinline__ void consume(const ChunkProblem& c, int group, int own_thread,
                                        Shared<kTiles, kGroups, kFused>& shared) {
  constexpr int kRecords = Shared<kTiles, kGroups, kFused>::kRecords;
  float s[32 * kTiles];
  bfloat16* to;
  const Walk& walk = shared.walk;
  {
    const std::int64_t column = walk.column + 64 * group;
    read_state<kTiles>(s, c.p.initial_state, walk.n, walk.i_h, column + 16 * (own_thread / 32), own_thread % 32);
    to = c.p.o.at(walk.i_b, walk.begin + own_thread / 8, walk.i_h, column + 8 * (own_thread % 8));
  }
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int thread = opaque(own_thread), warp = thread / 32, lane = thread % 32;
    Rows<kTiles, kGroups>& rows = shared.rows[chunk % kStages];
    const ChunkRecord& record = shared.record[chunk % kRecords];
    unsigned char* tile = rows.v + group * kTileBytes;
    std::uint32_t operand[4 * kTiles][4], u[4][4], written[4][4];
    float e[32], o[32];
#pragma unroll
    for (int step = 0; step < 4 * kTiles; ++step) to_operand(operand[step], s + 8 * step);
    leave_undefined(e);
    leave_undefined(o);
    barrier_wait(&shared.rows_full[chunk % kStages], parity(chunk, kStages));
    products_fence();
    multiply_state<kTiles>(e, operand, shared_address(rows.k));
    products_commit();
    multiply_state<kTiles>(o, operand, shared_address(rows.q));
    products_commit();
    barrier_wait(&shared.record_full[chunk % kRecords], parity(chunk, kRecords));
    products_wait<kGroups == 1 ? 1 : 0>();  // two groups hide the wait for o, and have no registers to spare
    residual(written, e, shared_address(tile), record, warp, lane);
    const std::uint64_t t = row_operand(shared_address(record.t)), p = row_operand(shared_address(record.p));
    products_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_64<false>(e, written[step], t + step * kRowStep, step > 0);
    products_commit();
    products_wait<0>();
#pragma unroll
    for (int step = 0; step < 4; ++step) to_operand(u[step], e + 8 * step);
    scale_columns(e, record.write, lane);
#pragma unroll
    for (int step = 0; step < 4; ++step) to_operand(written[step], e + 8 * step);
    const float decay = record.decay;
#pragma unroll
    for (float& x : s) x *= decay;
    scale_columns(o, record.out, lane);
    products_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_64<false>(o, u[step], p + step * kRowStep, true);
    products_commit();
    const std::uint64_t k = column_operand(shared_address(rows.k));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (kTiles == 2) {
        multiply_128<true>(s, written[step], k + step * kColumnStep, true);
      } else {
        multiply_64<true>(s, written[step], k + step * kColumnStep, true);
      }
    }
    products_commit();
    products_wait<1>();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.record_free[chunk % kRecords]);
    write_outputs(o, tile, warp, lane);
    named_barrier(kStoreBarrier + group, kGroupThreads);
    if (walk.column + 64 * group + 8 * (thread % 8) < c.p.o.extent[3]) {
      store_tile(to, c.p.o.stride[1], walk.rows(chunk), thread, tile);
    }
    to += kChunkTokens * c.p.o.stride[1];
    products_wait<0>();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.rows_free[chunk % kStages]);
  }
  write_state<kTiles>(s, c.p.final_state, walk.n, walk.i_h, walk.column + 64 * group + 16 * (own_thread / 32),
                      own_thread % 32);
}

template <int kTiles, int kGroups, bool kFused>
__global__ void __launch_bounds__(kGroupThreads*(kGroups + 1), 1)
    sweep_kernel(const __grid_constant__ ChunkProblem c, int slices) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kTiles, kGroups, kFused>*>(memory);
  if (threadIdx.x == 0) {
    shared.walk = walk_of<kGroups>(c, slices);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.rows_full[i], 1);
      barrier_init(&shared.rows_free[i], kGroups * kGroupWarps);
    }
    for (int i = 0; i < shared.kRecords; ++i) {
      barrier_init(&shared.record_full[i], 1);
      barrier_init(&shared.record_free[i], kGroups * kGroupWarps);
    }
    fence_for_products();
  }
  __syncthreads();
  // What the warpgroups take together must be no more than what the block was started with, 168 for each of 384
  // threads.
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if (group == 0) {
    if constexpr (kGroups == 2) give_registers<kFused ? 120 : 40>();
    produce(c, thread, shared);
  } else {
    if constexpr (kGroups == 2) take_registers<kFused ? 192 : 232>();
    consume(c, group - 1, thread, shared);
  }
}

template <int kTiles, int kGroups, bool kFused>
void launch(const ChunkProblem& c, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kTiles, kGroups, kFused>);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = sweep_kernel<kTiles, kGroups, kFused>;
  const std::int64_t slices = (c.p.shape.value_dim + 64 * kGroups - 1) / (64 * kGroups);
  const unsigned grid = grid_of("chunk_fwd", c.p.shape.sequences() * c.p.shape.value_heads * slices);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  kernel<<<grid, kGroupThreads*(kGroups + 1), kBytes, stream>>>(c, static_cast<int>(slices));
  check_launch("sweep");
}

template <int kTiles>
void launch(const ChunkProblem& c, bool fused, cudaStream_t stream) {
  if (fused) {
    if (c.p.shape.value_dim > 64) return launch<kTiles, 2, true>(c, stream);
    return launch<kTiles, 1, true>(c, stream);
  }
  launch<kTiles, 1, false>(c, stream);
}

}  // namespace

void launch_sweep_sm90(const ChunkProblem& c, bool fused, cudaStream_t stream) {
  if (c.p.shape.key_dim <= 64) return launch<1>(c, fused, stream);
  launch<2>(c, fused, stream);
}

}  // namespace efla::gpu
