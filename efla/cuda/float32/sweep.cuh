// What the sweeps over the state share. A thread block has a sequence, a value head and a slice of kFloat32Columns
// value columns, and walks the chunks of the sequence. The keys are divided among groups of four warps. Each warp keeps
// 16 rows of the transposed state Sᵀ [V, K], with the keys of its group, in registers as accumulators of mma. The
// accumulators are also first operands, so neither the state nor R nor U leaves the registers. All matrices are the
// transposed of those at Float32Record: rows are value columns, and columns are tokens. The groups exchange their parts
// of sums over keys through shared memory.
#pragma once

#include <cstddef>
#include <type_traits>

#include "efla/cuda/common/launch.h"
#include "efla/cuda/float32/products.cuh"

namespace efla::gpu {

// A matrix of a warp's 16 value columns by the tokens of a chunk.
using Columns16 = float[kFloat32Tokens / 2];

// What the products of a chunk read. kChannel: with a gate per key channel.
template <int KD, bool kChannel>
struct SweepStage {
  alignas(128) float k[kFloat32Tokens * KD], q[kFloat32Tokens * KD];
  Float32Record record;

  // Returns the keys that multiply write∘U in the update of the state.
  __device__ const float* written_keys() const { return k; }
};
template <int KD>
struct SweepStage<KD, true> : Float32ChannelRecord<KD> {
  __device__ const float* written_keys() const { return this->written; }
};

// The shared memory of a thread block. The KD keys are divided among kGroups groups of four warps, and each group has
// all value columns of the slice.
template <int KD, int kGroups, bool kChannel>
struct SweepMemory {
  static constexpr int kKeys = KD, kThreads = 128 * kGroups, kCount = KD / kGroups / 2;
  static constexpr bool kChannelGates = kChannel;
  using State = float[kCount];  // of a warp
  using Stage = SweepStage<KD, kChannel>;

  Stage stages[2];
  float4 parts[2][kGroups][4][kFloat32Tokens / 8][32];  // a group's parts of sums over keys

  // Returns the group that computes a tile of 8 tokens of products that need only one group. Two groups then have the
  // same number of products with a lower triangular matrix.
  __device__ static int owner(int tile) { return kGroups == 2 ? tile == 1 || tile == 2 : tile % kGroups; }
};

// The place of a thread in a sweep: its lane, its warp's first value column in the slice, its group, and the group's
// first key.
struct SweepThread {
  int lane, column, group, key;
};

template <class Memory>
__device__ __forceinline__ SweepThread sweep_thread() {
  const int thread = threadIdx.x, group = thread / 128;
  return {thread % 32, thread / 32 % 4 * 16, group, group * 2 * Memory::kCount};
}

// Starts and commits the copies of a chunk's keys, record and, if kQueries is set, queries.
template <bool kQueries, int kThreads, int KD, bool kChannel>
__device__ __forceinline__ void start_loads(const Float32Problem& c, const ChunkAt& at, std::int64_t slot,
                                            std::int64_t i_h, SweepStage<KD, kChannel>& stage) {
  const std::int64_t i_q = i_h / c.p.shape.group();
  const int thread = opaque(threadIdx.x) & (kThreads - 1);
  if constexpr (kChannel) {
    using Record = Float32ChannelRecord<KD>;
    load_image<kThreads>(static_cast<Record*>(&stage),
                         static_cast<const Record*>(c.records) + slot * c.p.shape.value_heads + i_h,
                         kQueries ? sizeof(Record) : offsetof(Record, q), thread);
  } else {
    load_tile<KD, kThreads>(stage.k, c.p.k, at.i_b, at.start, at.rows, i_q, 0, c.k_rows, thread);
    if constexpr (kQueries) {
      load_tile<KD, kThreads>(stage.q, c.p.q, at.i_b, at.start, at.rows, i_q, 0, c.q_rows, thread);
    }
    load_image<kThreads>(&stage.record,
                         static_cast<const Float32Record*>(c.records) + slot * c.p.shape.value_heads + i_h,
                         sizeof(Float32Record), thread);
  }
  copy_async_commit();
}

// Writes the group's part of a sum over keys.
__device__ __forceinline__ void put_part(const Columns16& x, float4 (&to)[kFloat32Tokens / 8][32], int lane) {
#pragma unroll
  for (int tile = 0; tile < kFloat32Tokens / 8; ++tile)
    to[tile][lane] = float4{x[4 * tile], x[4 * tile + 1], x[4 * tile + 2], x[4 * tile + 3]};
}
// Writes to x the sum of the parts of all groups, added in their order, for a tile of 8 tokens.
template <int kGroups>
__device__ __forceinline__ void add_parts(float* x, const float4 (&parts)[kGroups][4][kFloat32Tokens / 8][32],
                                          int columns, int tile, int lane) {
  float4 sum = parts[0][columns][tile][lane];
#pragma unroll
  for (int group = 1; group < kGroups; ++group) {
    const float4 part = parts[group][columns][tile][lane];
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
  }
  x[0] = sum.x;
  x[1] = sum.y;
  x[2] = sum.z;
  x[3] = sum.w;
}

// Computes Rᵀ = b∘vᵀ − read∘Eᵀ in the place of Eᵀ.
__device__ __forceinline__ void residual(Columns16& e, const Columns16& v, const Float32Record& record, int lane) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int i = 0; i < kFloat32Tokens / 2; i += 2) {
    const int token = i / 4 * 8 + 2 * (lane % 4);
    const float2 b = *reinterpret_cast<const float2*>(record.b + token),
                 read = *reinterpret_cast<const float2*>(record.read + token);
    e[i] = b.x * v[i] - read.x * e[i];
    e[i + 1] = b.y * v[i + 1] - read.y * e[i + 1];
  }
}

// d += a mᵀ with a lower triangular matrix m, only for the tiles of 8 tokens for which owned(tile) is true.
template <class Owned>
__device__ __forceinline__ void multiply_lower(Columns16& d, const Columns16& a, std::uint32_t m, int lane,
                                               Owned&& owned) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int step = 0; step < kFloat32Tokens / 8; ++step) {
    __syncwarp();  // as in add_to_state
    const auto operand = operand_of(a + 4 * step);
#pragma unroll
    for (int tile = step; tile < kFloat32Tokens / 8; ++tile) {
      if (owned(tile)) multiply_rows<kFloat32Tokens>(d + 4 * tile, operand, m, 8 * tile, 8 * step, lane);
    }
  }
}
// d += a m with a lower triangular matrix m. owned as in multiply_lower.
template <class Owned>
__device__ __forceinline__ void multiply_upper(Columns16& d, const Columns16& a, std::uint32_t m, int lane,
                                               Owned&& owned) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int step = 0; step < kFloat32Tokens / 8; ++step) {
    const auto operand = operand_of(a + 4 * step);
#pragma unroll
    for (int tile = 0; tile <= step; ++tile) {
      if (owned(tile)) multiply_columns<kFloat32Tokens>(d + 4 * tile, operand, m, 8 * step, 8 * tile, lane);
    }
  }
}

// Solves (I + A) U = R. `matrix` is the record's `solve`. Overwrites R.
__device__ __forceinline__ void solve_lower(Columns16& u, Columns16& r, std::uint32_t matrix, int lane) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int i = 0; i < kFloat32Tokens / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) u[4 * i + j] = 0;
    multiply_rows<kFloat32Tokens>(u + 4 * i, operand_of(r + 4 * i), matrix, 8 * i, 8 * i, lane);
    const auto operand = operand_of(u + 4 * i);
#pragma unroll
    for (int tile = i + 1; tile < kFloat32Tokens / 8; ++tile) {
      multiply_rows<kFloat32Tokens>(r + 4 * tile, operand, matrix, 8 * tile, 8 * i, lane);
    }
  }
}
// Solves (I + A)ᵀ D = dU. Overwrites dU. kInSteps: the products of a step end before the next begin, as in
// add_to_state.
template <bool kInSteps>
__device__ __forceinline__ void solve_upper(Columns16& d, Columns16& du, std::uint32_t matrix, int lane) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int i = kFloat32Tokens / 8 - 1; i >= 0; --i) {
    if constexpr (kInSteps) __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) d[4 * i + j] = 0;
    multiply_columns<kFloat32Tokens>(d + 4 * i, operand_of(du + 4 * i), matrix, 8 * i, 8 * i, lane);
    const auto operand = operand_of(d + 4 * i);
#pragma unroll
    for (int tile = 0; tile < i; ++tile) {
      multiply_columns<kFloat32Tokens>(du + 4 * tile, operand, matrix, 8 * i, 8 * tile, lane);
    }
  }
}

// e += Sᵀ kᵀ over the group's keys. `k` is the address of the keys' rows at the group's first key.
template <int KD, int kCount>
__device__ __forceinline__ void multiply_state(Columns16& e, const float (&s)[kCount], std::uint32_t k, int lane) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int step = 0; step < kCount / 4; ++step) {
    const auto operand = operand_of(s + 4 * step);
#pragma unroll
    for (int tile = 0; tile < kFloat32Tokens / 8; ++tile) {
      multiply_rows<KD>(e + 4 * tile, operand, k, 8 * tile, 8 * step, lane);
    }
  }
}
// e += Sᵀ kᵀ and o += Sᵀ qᵀ.
template <int KD, int kCount>
__device__ __forceinline__ void multiply_state(Columns16& e, Columns16& o, const float (&s)[kCount], std::uint32_t k,
                                               std::uint32_t q, int lane) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int step = 0; step < kCount / 4; ++step) {
    const auto operand = operand_of(s + 4 * step);
#pragma unroll
    for (int tile = 0; tile < kFloat32Tokens / 8; ++tile) {
      multiply_rows<KD>(e + 4 * tile, operand, k, 8 * tile, 8 * step, lane);
      multiply_rows<KD>(o + 4 * tile, operand, q, 8 * tile, 8 * step, lane);
    }
  }
}

// Sᵀ += a k.
template <int KD, int kCount>
__device__ __forceinline__ void add_to_state(float (&s)[kCount], const Columns16& a, std::uint32_t k, int lane) {
  lane = opaque(lane) & 31;
#pragma unroll
  for (int step = 0; step < kFloat32Tokens / 8; ++step) {
    // The products of a step end before the next begin, because ptxas would keep operands of several steps in
    // registers.
    __syncwarp();
    const auto operand = operand_of(a + 4 * step);
#pragma unroll
    for (int tile = 0; tile < kCount / 4; ++tile) {
      multiply_columns<KD>(s + 4 * tile, operand, k, 8 * step, 8 * tile, lane);
    }
  }
}

// Multiplies the state by the decay over the chunk. `key` is the first key of s.
template <int KD, bool kChannel, int kCount>
__device__ __forceinline__ void decay_state(float (&s)[kCount], const SweepStage<KD, kChannel>& stage, int key,
                                            int lane) {
  if constexpr (kChannel) {
    scale_by_column(s, stage.decay + key, lane);
  } else {
#pragma unroll
    for (float& x : s) x *= stage.record.decay;
  }
}

// Calls f(element of s, address in `state`) for a warp's part of a state: 16 value columns from `column` on, and the
// keys from `key` on. Elements that the state does not have are left out.
template <int kCount, class T, class F>
__device__ __forceinline__ void for_each_of_state(float (&s)[kCount], const View<T, 4>& state, std::int64_t n,
                                                  std::int64_t i_h, std::int64_t column, int key, int lane, F&& f) {
  const std::int64_t stride = state.stride[2];
  lane = opaque(lane) & 31;
  const int first = key + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t own = column + lane / 4 + 8 * r;
    const int keys = own < state.extent[3] ? static_cast<int>(state.extent[2]) - first : 0;
    T* element = state.at(n, i_h, first, own);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      if (8 * i < keys) f(s[4 * i + 2 * r], element);
      if (8 * i + 1 < keys) f(s[4 * i + 2 * r + 1], element + stride);
      element += 8 * stride;
    }
  }
}

template <int kCount>
__device__ __forceinline__ void read_state(float (&s)[kCount], const View<const float, 4>& state, std::int64_t n,
                                           std::int64_t i_h, std::int64_t column, int key, int lane) {
#pragma unroll
  for (float& x : s) x = 0;
  if (!state) return;
  for_each_of_state(s, state, n, i_h, column, key, lane, [](float& x, const float* from) { x = *from; });
}
template <int kCount>
__device__ __forceinline__ void write_state(float (&s)[kCount], const View<float, 4>& state, std::int64_t n,
                                            std::int64_t i_h, std::int64_t column, int key, int lane) {
  if (!state) return;
  for_each_of_state(s, state, n, i_h, column, key, lane, [](float x, float* to) { *to = x; });
}

// Calls f(i, stage) for i from 0 to `chunks` − 1, after the copies that start(i, stage) started have arrived. Copies
// one chunk ahead.
template <class Stage, class Start, class F>
__device__ __forceinline__ void for_each_chunk(Stage (&stages)[2], std::int64_t chunks, Start&& start, F&& f) {
  if (chunks > 0) start(0, stages[0]);
#pragma unroll 1
  for (std::int64_t i = 0; i < chunks; ++i) {
    if (i + 1 < chunks) {
      start(i + 1, stages[(i + 1) % 2]);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    f(i, stages[i % 2]);
    __syncthreads();
  }
}

// Calls launch(std::type_identity<Memory>()) with the SweepMemory for the problem's keys.
template <bool kChannel, class Launch>
void launch_for_keys(const DeltaShape& shape, Launch&& launch) {
  using Narrow = SweepMemory<64, 2, kChannel>;
  using Broad = SweepMemory<128, 2, kChannel>;
  static_assert(sizeof(Narrow) <= 98 * 1024 && sizeof(Broad) + 1024 <= kFloat32LargeBytes<kChannel>);
  float32_keys(shape) == 64 ? launch(std::type_identity<Narrow>()) : launch(std::type_identity<Broad>());
}
template <class Launch>
void launch_for(const Float32Problem& c, Launch&& launch) {
  has_decayed_rows(c.p.rule) ? launch_for_keys<true>(c.p.shape, launch) : launch_for_keys<false>(c.p.shape, launch);
}

template <class Memory, class Problem, class... Arguments>
void launch_sweep(const char* name, void (*kernel)(Problem, Arguments...), std::int64_t blocks, const Problem& problem,
                  cudaStream_t stream, Arguments... arguments) {
  launch_kernel(name, kernel, grid_of("chunk_float32", blocks), Memory::kThreads, sizeof(Memory), stream, problem,
                arguments...);
}

}  // namespace efla::gpu
