// `prepare` where every key channel has a gate or where the rule has two keys: computes the Float32ChannelRecord of
// every chunk and value head. One thread block per chunk and value head. With two keys an erase key takes the place of
// a key where a row is a key's, and columns are keys. Without gates per channel every channel has the gate of the head.
//
// Γ_ij is the decay from a reference token to token i, times the decay from token j to the reference token. These
// factors multiply rows of queries and keys before the products. For tokens in different halves of the chunk the
// reference is the last token of the first half. For other tokens in different blocks it is the last token of the
// earlier block. Products of tokens of the same block are added in float32, by one warp per block and one lane per
// channel, and the keys are decayed from token to token.
#include "efla/cuda/common/lane_sums.cuh"
#include "efla/cuda/float32/channels.cuh"
#include "efla/cuda/float32/prepare.cuh"

namespace efla::gpu {
namespace {

constexpr int kThreads = kPrepareThreads;
static_assert(kThreads / 32 == kFloat32Blocks);

template <int KD, bool kTwoKeys>
struct Memory {
  // Keys and queries after the L2 norm, and gates. Then, in their places, keys and queries decayed from their block's
  // start, and keys decayed to its end.
  alignas(128) float k[kFloat32Tokens * KD], q[kFloat32Tokens * KD], g[kFloat32Tokens * KD];
  float over[kFloat32Blocks][KD];  // the decay over a block
  Float32Record record;
  Float32Vectors vectors;
  float erase[kTwoKeys ? kFloat32Tokens * KD : 0];  // erase keys, times the factors of the L2 norm of keys
};

// The products of the tokens of a block, as lower triangles with element (i, j) at i (i + 1) / 2 + j. Row i < 7 of
// `keys` has the products of key i + 1 with keys j, and row i < 7 of `queries` the products of query i with keys j. The
// last four elements of both belong to query 7: its products with keys 0 to 3 in `keys`, and with keys 4 to 7 in
// `queries`.
struct BlockSums {
  float keys[32], queries[32];
};

// Adds the products of one channel of a block's tokens to the sums.
__device__ __forceinline__ void add_products(BlockSums& sums, const float (&k)[kFloat32Block],
                                             const float (&erase)[kFloat32Block], const float (&q)[kFloat32Block],
                                             const float (&decays)[kFloat32Block]) {
  float decayed[kFloat32Block];  // keys, decayed to token i
#pragma unroll
  for (int i = 0; i < kFloat32Block; ++i) {
    decayed[i] = k[i];
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      if (j < i) {
        decayed[j] *= decays[i];
        sums.keys[(i - 1) * i / 2 + j] += erase[i] * decayed[j];
      }
      float& of_query = i < 7 ? sums.queries[i * (i + 1) / 2 + j] : j < 4 ? sums.keys[28 + j] : sums.queries[24 + j];
      of_query += q[i] * decayed[j];
    }
  }
}

// Decays the rows of block `block` from its start and to its end, and sums the products of its tokens.
template <int KD, bool kTwoKeys>
__device__ __forceinline__ void decay_block(BlockSums& sums, int block, int lane, Memory<KD, kTwoKeys>& m) {
#pragma unroll 1
  for (int channel = lane; channel < KD; channel += 32) {
    float k[kFloat32Block], q[kFloat32Block], decays[kFloat32Block], of_two_keys[kFloat32Block], decay = 1;
    auto& erase = kTwoKeys ? of_two_keys : k;
    const auto place = [&](int i) { return tile_index<KD>(kFloat32Block * block + i, channel); };
#pragma unroll
    for (int i = 0; i < kFloat32Block; ++i) {
      k[i] = m.k[place(i)];
      if constexpr (kTwoKeys) erase[i] = m.erase[place(i)];
      q[i] = m.q[place(i)];
      decays[i] = expf(m.g[place(i)]);
    }
    add_products(sums, k, erase, q, decays);
#pragma unroll
    for (int i = 0; i < kFloat32Block; ++i) {
      decay *= decays[i];
      m.k[place(i)] = erase[i] * decay;
      m.q[place(i)] = q[i] * decay;
    }
    m.over[block][channel] = decay;
    decay = 1;
#pragma unroll
    for (int i = kFloat32Block - 1; i >= 0; --i) {
      m.g[place(i)] = k[i] * decay;
      decay *= decays[i];
    }
  }
}

// Writes an element of −A or P, from the product of a key or query with a key.
template <int KD, bool kTwoKeys>
__device__ __forceinline__ void write_product(float x, bool query, int row, int column, float scale,
                                              Memory<KD, kTwoKeys>& m) {
  (query ? m.record.p : m.record.solve)[tile_index<kFloat32Tokens>(row, column)] =
      x * (query ? scale : -m.vectors.a[row]);
}

// Writes the products of the tokens of a block.
template <int KD, bool kTwoKeys>
__device__ __forceinline__ void write_block(BlockSums& sums, int block, int lane, float scale,
                                            Memory<KD, kTwoKeys>& m) {
  sum_over_lanes(sums.keys, lane);
  sum_over_lanes(sums.queries, lane);
  int row = 0;
  while ((row + 1) * (row + 2) / 2 <= lane) ++row;
  const int first = kFloat32Block * block, column = lane - row * (row + 1) / 2;
  const bool last = row == kFloat32Block - 1;
  write_product(sums.keys[0], last, first + (last ? row : row + 1), first + column, scale, m);
  write_product(sums.queries[0], true, first + row, first + (last ? 4 + column : column), scale, m);
}

// Computes and writes the products of tokens of different blocks. Two warps have the products of the second half of the
// chunk (blocks 2 and 3) with the first half, one for keys and one for queries. The other two warps have the products
// of blocks 1 and 3 with the block before each, which need half of the columns.
template <int KD, bool kTwoKeys>
__device__ __forceinline__ void multiply_blocks(int warp, int lane, float scale, Memory<KD, kTwoKeys>& m) {
  const bool queries = warp >= 2, across = warp % 2 == 0;
  const int low = across ? 2 : 1, high = 3, second = across ? 1 : 2;  // blocks of rows, and the second of columns
  const std::uint32_t rows = shared_address(queries ? m.q : m.k), columns = shared_address(m.g);
  float x[8] = {};
#pragma unroll 2
  for (int step = 0; step < KD / 8; ++step) {
    const int own = 8 * step + 2 * (lane % 4);
    const auto pair = [&](std::uint32_t tile, int block) {
      return read_shared_pair(element_address<KD>(tile, kFloat32Block * block + lane / 4, own));
    };
    const auto over = [&](int block) {
      return across ? *reinterpret_cast<const float2*>(&m.over[block][own]) : float2{1, 1};
    };
    const float2 before = pair(rows, low), after = pair(rows, high), to_after = over(2), from_first = over(1);
    const float elements[4] = {before.x, before.y, after.x * to_after.x, after.y * to_after.y};
    const Operand operand = operand_of(elements);
    const float2 first = pair(columns, 0), other = pair(columns, second);
    multiply(x, operand, first.x * from_first.x, first.y * from_first.y);
    multiply(x + 4, operand, other.x, other.y);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool upper = i / 2 % 2 != 0;
    if (!across && upper != (i >= 4)) continue;
    write_product(x[i], queries, kFloat32Block * (upper ? high : low) + lane / 4,
                  kFloat32Block * (i < 4 ? 0 : second) + 2 * (lane % 4) + i % 2, scale, m);
  }
}

__device__ __forceinline__ float4 product(float4 x, float4 y) { return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w}; }

// Writes the decayed keys and queries that the sweeps multiply, and γ_C.
template <int KD, bool kTwoKeys>
__device__ __forceinline__ void write_rows(int thread, const Memory<KD, kTwoKeys>& m, Float32ChannelRecord<KD>& to) {
  const auto over = [&](int first, int last, int channel) {
    float4 decay{1, 1, 1, 1};
    for (int block = first; block < last; ++block)
      decay = product(decay, *reinterpret_cast<const float4*>(&m.over[block][channel]));
    return decay;
  };
  const auto scale = [&](float* rows, const float* from, int i, float4 factor) {
    reinterpret_cast<float4*>(rows)[i] = product(reinterpret_cast<const float4*>(from)[i], factor);
  };
#pragma unroll
  for (int block = 0; block < kFloat32Blocks; ++block) {
    constexpr int kPieces = kFloat32Block * KD / 4;
    for (int i = kPieces * block + thread; i < kPieces * (block + 1); i += kThreads) {
      const int row = 4 * i / KD, place = 4 * i % KD, channel = (place & ~31) + ((place & 31) ^ swizzle(row));
      const float4 before = over(0, block, channel);
      scale(to.k, m.k, i, before);
      scale(to.q, m.q, i, before);
      scale(to.written, m.g, i, over(block + 1, kFloat32Blocks, channel));
    }
  }
  if (thread < KD / 4) reinterpret_cast<float4*>(to.decay)[thread] = over(0, kFloat32Blocks, 4 * thread);
}

// Starts the copy of the gates of every channel to their tile, or writes the gate of the head there.
template <int KD, bool kTwoKeys>
__device__ __forceinline__ void load_gates(const Float32Problem& c, const ChunkAt& at, std::int64_t i_h, int thread,
                                           Memory<KD, kTwoKeys>& m) {
  const DeltaForward<float>& p = c.p;
  if constexpr (kTwoKeys) {
    if (p.rule.decay != Decay::channel) {
      for (int i = thread; i < kFloat32Tokens * KD; i += kThreads) {
        m.g[i] = p.g && i / KD < at.rows ? p.g(at.i_b, at.start + i / KD, i_h, 0) : 0.0F;
      }
      return;
    }
  }
  load_tile<KD, kThreads>(m.g, p.g, at.i_b, at.start, at.rows, i_h, 0, c.g_rows, thread);
}

template <int KD, bool kTwoKeys>
__global__ void __launch_bounds__(kThreads) prepare_channel_kernel(const __grid_constant__ Float32Problem c) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& m = *reinterpret_cast<Memory<KD, kTwoKeys>*>(shared);
  const DeltaForward<float>& p = c.p;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const std::int64_t slot = blockIdx.x / p.shape.value_heads, i_h = blockIdx.x % p.shape.value_heads,
                     i_q = i_h / p.shape.group(), index = slot * p.shape.value_heads + i_h;
  const ChunkAt at = chunk_at(c, slot);
  if (at.rows == 0) return;
  load_tile<KD, kThreads>(m.k, p.k, at.i_b, at.start, at.rows, i_q, 0, c.k_rows, thread);
  load_tile<KD, kThreads>(m.q, p.q, at.i_b, at.start, at.rows, i_q, 0, c.q_rows, thread);
  load_gates(c, at, i_h, thread, m);
  if constexpr (kTwoKeys) {
    load_tile<KD, kThreads>(m.erase, p.erase_key, at.i_b, at.start, at.rows, i_q, 0, c.erase_rows, thread);
  }
  copy_async_commit();
  for (int i = thread; i < kFloat32Tokens * kFloat32Tokens / 4; i += kThreads) {
    reinterpret_cast<float4*>(m.record.solve)[i] = reinterpret_cast<float4*>(m.record.p)[i] = float4{};
  }
  copy_async_wait<0>();
  __syncthreads();
  normalise_rows<KD>(m.k, p.rule.qk_l2norm, thread, m.vectors.key_factor, m.vectors.lambda);
  normalise_rows<KD>(m.q, p.rule.qk_l2norm, thread, m.vectors.query_factor, nullptr);
  if constexpr (kTwoKeys) normalise_erase_keys<KD>(m.erase, m.k, thread, m.vectors);
  __syncthreads();
  if (warp == 0) token_vectors<true, kTwoKeys>(c, at, i_h, lane, m.record, m.vectors);
  BlockSums sums{};
  decay_block(sums, warp, lane, m);
  __syncthreads();
  write_block(sums, warp, lane, c.scale, m);
  multiply_blocks(warp, lane, c.scale, m);
  __syncthreads();
  if (warp == 0) invert_blocks(lane, m.record);
  auto& to = static_cast<Float32ChannelRecord<KD>*>(c.records)[index];
  write_rows(thread, m, to);
  __syncthreads();
  store_record(c, index, m.record, m.vectors, to.record, thread);
}

template <int KD, bool kTwoKeys>
void launch(const Float32Problem& c, cudaStream_t stream) {
  launch_prepare_kernel("chunk_float32, prepare by channel", prepare_channel_kernel<KD, kTwoKeys>,
                        sizeof(Memory<KD, kTwoKeys>), c, stream);
}

template <int KD>
void launch(const Float32Problem& c, cudaStream_t stream) {
  c.p.rule.two_keys ? launch<KD, true>(c, stream) : launch<KD, false>(c, stream);
}

}  // namespace

void launch_float32_prepare_channel(const Float32Problem& c, cudaStream_t stream) {
  float32_keys(c.p.shape) == 64 ? launch<64>(c, stream) : launch<128>(c, stream);
}

}  // namespace efla::gpu
