// `prepare` where every key channel has a gate or the rule has two keys: computes the record and the ScaledRows
// (chunk.h) of every chunk and value head. With two keys an erase key takes the place of a key where a row is a key's,
// and columns are keys. Without gates per channel every channel has the gate of the head. One thread block of eight
// warps per chunk and value head. First a thread scales two channels of a block of 16 tokens. Then four warps compute T
// from the keys and four warps compute P from the queries, one block row of 16 tokens per warp (prepare.cuh).
// docs/design/2026-11-cuda-forward.md, "A gate per key channel", explains the kernel.
//
// Γ_ij = γ_i/γ_j is a vector over the channels. It is the product of the decay from a reference token to token i and
// the decay from token j to the reference token. These factors multiply rows of queries and keys before the products.
// The reference token of a block row is the eighth token of its block, if the decays between the reference and the
// block's tokens stay within 2^±kRange. Otherwise the channel is *deep* in this block, and the reference is the last
// token before the block. So no factor overflows, and Γ_ij underflows where a factor does. In deep channels the factors
// of the block's own keys are zeros, and the products of tokens within the block are added pair by pair in float32.
#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/chunk/prepare/channels.cuh"
#include "efla/cuda/chunk/prepare/prepare.cuh"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/launch.h"

namespace efla::gpu {
namespace {

constexpr int kThreads = 256;

// The largest |log2| of a decay between a block's tokens and its reference token. A row of float16 has a length below 2
// (unit_of). So its product with kHeadroom and such a decay stays below 2¹⁵, and an element of 2⁻⁴ keeps all its
// digits.
template <class E>
constexpr float kRange = kUnitRows<E> ? 12 : 60;
template <class E>
constexpr float kHeadroom = kUnitRows<E> ? 4 : 1;

// Thread blocks per multiprocessor that registers must allow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <bool kTwoKeys>
constexpr int kResident = kTwoKeys ? 1 : 2;
#else
template <bool kTwoKeys>
constexpr int kResident = 1;
#endif

// Sums over the channels of a block's tokens, kBlock numbers of each kind: Σk² and Σq², with two keys also Σκ² and κ·k.
enum { kKeySquares, kQuerySquares, kEraseSquares, kEraseKey, kProducts };
template <bool kTwoKeys>
constexpr int kTokenSums = kBlock*(kTwoKeys ? kProducts : kEraseSquares);

// Rows of keys for the products with block row I: the keys of blocks 0 to I, decayed to the reference token of block I,
// 16 (I + 1) rows. column_row is the first of these rows.
constexpr int kColumnRows = kBlock * kBlocks * (kBlocks + 1) / 2;
constexpr int column_row(int block) { return kBlock * block * (block + 1) / 2; }

template <int kTiles, bool kTwoKeys>
struct ChannelMemory {
  union {
    struct {
      unsigned char keys[kTiles * kTileBytes], queries[kTiles * kTileBytes];
      unsigned char columns[kTiles][kColumnRows * 128];
    } rows;
    struct {
      ChunkRecord record;
      PrepareScratch scratch;
    } products;
  };
  // log2 of decays from the block's start to its end and to its reference token
  float total[kBlocks][64 * kTiles], middle[kBlocks][64 * kTiles];
  unsigned deep[kBlocks][2 * kTiles];  // of 64 channels, one word for the even and one for the odd channels
  float squares[kTiles][kBlocks][kTokenSums<kTwoKeys>];  // over 64 channels
  ChunkAt at;
  __device__ ChannelMemory() {}
};

// Two channels of a block of 16 tokens.
template <bool kTwoKeys>
struct Channels {
  float decay[kBlock][2];  // log2 of the decays from the block's start to the token
  std::uint32_t k[kBlock], q[kBlock], erase_key[kTwoKeys ? kBlock : 0];

  // Returns the keys that erase.
  __device__ __forceinline__ const std::uint32_t (&erasing() const)[kBlock] {
    if constexpr (kTwoKeys) {
      return erase_key;
    } else {
      return k;
    }
  }
};

// Returns two neighbouring elements of a row. `count` of them exist, and the others are zeros. kAligned: both elements
// or none exist, at an aligned address.
template <bool kAligned, class E>
__device__ __forceinline__ std::uint32_t read_pair(const E* from, std::int64_t stride, int count) {
  if constexpr (kAligned) return count > 0 ? *reinterpret_cast<const std::uint32_t*>(from) : 0;
  std::uint32_t pair = count > 0 ? from->bits : 0;
  if (count > 1) pair |= static_cast<std::uint32_t>(from[stride].bits) << 16;
  return pair;
}
template <bool kAligned>
__device__ __forceinline__ float2 read_pair(const float* from, std::int64_t stride, int count) {
  if constexpr (kAligned) return count > 0 ? *reinterpret_cast<const float2*>(from) : float2{};
  return {count > 0 ? *from : 0.0F, count > 1 ? from[stride] : 0.0F};
}

// Returns the gate of a head, if there is one, as the gates of two channels of which `count` exist.
__device__ __forceinline__ float2 head_gates(const float* from, int count) {
  return {from && count > 0 ? *from : 0.0F, from && count > 1 ? *from : 0.0F};
}

// Reads channels `channel` and `channel` + 1 of a block's tokens and adds up their gates.
template <bool kAligned, bool kTwoKeys, class E>
__device__ __forceinline__ void read_channels(const ChunkProblem<E>& c, const ChunkAt& at, std::int64_t i_h, int block,
                                              int channel, Channels<kTwoKeys>& x) {
  const DeltaForward<E>& p = c.p;
  const std::int64_t t = at.start + kBlock * block, i_q = i_h / p.shape.group();
  const int exist = min(max(static_cast<int>(p.shape.key_dim) - channel, 0), 2), tokens = at.rows - kBlock * block;
  const E *k = p.k.at(at.i_b, t, i_q, channel), *q = p.q.at(at.i_b, t, i_q, channel);
  const bool by_head = kTwoKeys && p.rule.decay != Decay::channel;
  const float* g = p.g.at(at.i_b, t, i_h, by_head ? 0 : channel);
  const E* erase_key = kTwoKeys ? p.erase_key.at(at.i_b, t, i_q, channel) : nullptr;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const int count = i < tokens ? exist : 0;
    const float2 gates = by_head ? head_gates(p.g ? g : nullptr, count) : read_pair<kAligned>(g, p.g.stride[3], count);
    if constexpr (kTwoKeys) {
      x.erase_key[i] = read_pair<kAligned>(erase_key, p.erase_key.stride[3], count);
      erase_key += p.erase_key.stride[1];
    }
    x.k[i] = read_pair<kAligned>(k, p.k.stride[3], count);
    x.q[i] = read_pair<kAligned>(q, p.q.stride[3], count);
    g += p.g.stride[1];
    k += p.k.stride[1];
    q += p.q.stride[1];
    x.decay[i][0] = gates.x;
    x.decay[i][1] = gates.y;
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      x.decay[i][e] = limited_gate(x.decay[i][e]);
      if (i > 0) x.decay[i][e] += x.decay[i - 1][e];
    }
  }
}

// Writes to shared memory what other blocks and other channels need: sums of squares, total decays, and which channels
// are deep.
template <class E, int kTiles, bool kTwoKeys>
__device__ __forceinline__ void share_channels(const Channels<kTwoKeys>& x, int block, int channel, int lane,
                                               ChannelMemory<kTiles, kTwoKeys>& memory) {
  const auto share_products = [&](const std::uint32_t(&pairs)[kBlock], const std::uint32_t(&others)[kBlock],
                                  float* to) {
    float products[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      products[i] = low_of<E>(pairs[i]) * low_of<E>(others[i]) + high_of<E>(pairs[i]) * high_of<E>(others[i]);
    }
    sum_over_lanes(products, lane);
    if (lane < kBlock) to[lane] = products[0];
  };
  share_products(x.k, x.k, memory.squares[channel / 64][block] + kBlock * kKeySquares);
  share_products(x.q, x.q, memory.squares[channel / 64][block] + kBlock * kQuerySquares);
  if constexpr (kTwoKeys) {
    share_products(x.erase_key, x.erase_key, memory.squares[channel / 64][block] + kBlock * kEraseSquares);
    share_products(x.erase_key, x.k, memory.squares[channel / 64][block] + kBlock * kEraseKey);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float middle = x.decay[kBlock / 2 - 1][e];
    bool deep = !(fabsf(middle) <= kRange<E>);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) deep = deep || !(fabsf(x.decay[i][e] - middle) <= kRange<E>);
    memory.total[block][channel + e] = x.decay[kBlock - 1][e];
    memory.middle[block][channel + e] = deep ? 0.0F : middle;
    const unsigned mask = __ballot_sync(0xffffffffU, deep);
    if (lane == 0) memory.deep[block][channel / 64 * 2 + e] = mask;
  }
}

// Returns a pair times a factor.
template <class E>
__device__ __forceinline__ std::uint32_t scaled_pair(std::uint32_t pair, float factor) {
  return pack<E>(low_of<E>(pair) * factor, high_of<E>(pair) * factor);
}

// Multiplies the block's rows by their powers of two (unit_of).
template <class E, int kTiles, bool kTwoKeys>
__device__ __forceinline__ void make_units(Channels<kTwoKeys>& x, int block, int lane, bool qk_l2norm,
                                           const ChannelMemory<kTiles, kTwoKeys>& memory) {
  float squares = 0, erase_squares = 0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    squares += memory.squares[tile][block][lane];
    if constexpr (kTwoKeys) erase_squares += memory.squares[tile][block][kBlock * kEraseSquares + lane % kBlock];
  }
  const float unit = unit_of(squares, qk_l2norm), erase_unit = kTwoKeys ? unit_of(erase_squares, qk_l2norm) : 1.0F;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x.k[i] = scaled_pair<E>(x.k[i], __shfl_sync(0xffffffffU, unit, i));
    x.q[i] = scaled_pair<E>(x.q[i], __shfl_sync(0xffffffffU, unit, kBlock + i));
    if constexpr (kTwoKeys) x.erase_key[i] = scaled_pair<E>(x.erase_key[i], __shfl_sync(0xffffffffU, erase_unit, i));
  }
}

// Writes two channels of a token times factors x and y of each channel.
template <class E>
__device__ __forceinline__ void write_scaled(unsigned char* to, std::uint32_t pair, const float (&x)[2],
                                             const float (&y)[2]) {
  *reinterpret_cast<std::uint32_t*>(to) = pack<E>(low_of<E>(pair) * (x[0] * y[0]), high_of<E>(pair) * (x[1] * y[1]));
}

// Writes the decayed rows of two channels of a block: the operands of the products in shared memory, and the
// ScaledRows.
template <class E, int kTiles, bool kTwoKeys>
__device__ __forceinline__ void scale_channels(Channels<kTwoKeys>& x, int block, int channel, int lane,
                                               ChannelMemory<kTiles, kTwoKeys>& memory, ScaledRows<kTiles>& to) {
  const int tile = channel / 64, in_tile = kBlock * block * 128;
  const auto place = [](int i, int channel) { return piece_offset(i, channel % 64 / 8) + channel % 8 * 2; };
  const auto log_total = [&](int first, int last, int e) {  // log2 of the decay over blocks [first, last)
    float sum = 0;
    for (int other = first; other < last; ++other) sum += memory.total[other][channel + e];
    return sum;
  };
  float factor[2], middle[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (block == 0) to.decay[channel + e] = exp2_fast(log_total(0, kBlocks, e));
    factor[e] = exp2_fast(log_total(0, block, e));
    middle[e] = kHeadroom<E> * exp2_fast(-memory.middle[block][channel + e]);
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    if (i % 4 == 0) __syncwarp();  // keeps the compiler from computing later exponentials early: registers are scarce
    const float from_start[2] = {exp2_fast(x.decay[i][0]), exp2_fast(x.decay[i][1])};
    const int at = tile * kTileBytes + in_tile + place(i, channel);
    write_scaled<E>(memory.rows.queries + at, x.q[i], from_start, middle);
    write_scaled<E>(memory.rows.keys + at, x.erasing()[i], from_start, middle);
    write_scaled<E>(to.q + at, x.q[i], from_start, factor);
    write_scaled<E>(to.k + at, x.erasing()[i], from_start, factor);
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {  // from here on the decays from the token to the block's end
#pragma unroll
    for (int e = 0; e < 2; ++e) x.decay[i][e] = exp2_fast(memory.total[block][channel + e] - x.decay[i][e]);
  }
#pragma unroll 1
  for (int other = block; other < kBlocks; ++other) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool deep = other == block && (memory.deep[block][tile * 2 + e] >> lane & 1) != 0;
      const float from_end = other == block ? -memory.total[block][channel + e] : log_total(block + 1, other, e);
      factor[e] = deep ? 0.0F : kHeadroom<E> * exp2_fast(from_end + memory.middle[other][channel + e]);
    }
    unsigned char* rows = memory.rows.columns[tile] + column_row(other) * 128 + in_tile;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) write_scaled<E>(rows + place(i, opaque(channel)), x.k[i], x.decay[i], factor);
  }
  for (int e = 0; e < 2; ++e) factor[e] = exp2_fast(log_total(block + 1, kBlocks, e));
  unsigned char* rows = to.written + tile * kTileBytes + in_tile;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) write_scaled<E>(rows + place(i, opaque(channel)), x.k[i], x.decay[i], factor);
}

// Multiplies block row `warp` of `rows` by the keys that are decayed to the reference token of this block.
template <class E, int kTiles, bool kTwoKeys>
__device__ __forceinline__ void multiply_channels(const unsigned char* rows,
                                                  const ChannelMemory<kTiles, kTwoKeys>& memory, int warp, int lane,
                                                  BlockProducts& products) {
#pragma unroll
  for (float& x : products) x = 0;
#pragma unroll 2
  for (int step = 0; step < 4 * kTiles; ++step) {
    const std::uint32_t columns = shared_address(memory.rows.columns[step / 4]) + column_row(warp) * 128;
    std::uint32_t row[4];
    load_matrices(row,
                  block_address(shared_address(rows + step / 4 * kTileBytes), kBlock * warp, 2 * (step % 4), lane));
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b > warp) break;
      std::uint32_t column[4];
      load_matrices(column, block_address(columns, kBlock * b, 2 * (step % 4), lane));
      mma<E>(products + 8 * b, row, column[0], column[2]);
      mma<E>(products + 8 * b + 4, row, column[1], column[3]);
    }
  }
}

// Adds to `products` the products of the tokens of block `warp` with each other in deep channels: rows of `x` (erase
// keys or queries) times keys, each with a factor of the lane's token. Each half of the warp has one channel, and each
// lane one column. `block` is shared memory for 16 rows of 16 floats, `stride` floats apart.
template <class E, int kTiles, bool kTwoKeys>
__device__ __forceinline__ void add_deep_channels(const ChunkProblem<E>& c, const View<const E, 4>& x, float row_factor,
                                                  float key_factor, const ChunkAt& at, std::int64_t i_h, int warp,
                                                  int lane, const ChannelMemory<kTiles, kTwoKeys>& memory, float* block,
                                                  int stride, BlockProducts& products) {
  const DeltaForward<E>& p = c.p;
  const int column = lane % kBlock, token = kBlock * warp + column;
  const std::int64_t t = at.start + token, i_q = i_h / p.shape.group();
  const bool by_head = kTwoKeys && p.rule.decay != Decay::channel;
  float sums[kBlock] = {};
  bool any = false;
  for (int word = 0; word < 2 * kTiles; ++word) {
    for (unsigned mask = memory.deep[warp][word]; mask != 0; mask &= mask - 1) {
      any = true;
      const int first = __ffs(mask) - 1;
      mask &= mask - 1;
      const int pair = lane < kBlock ? first : __ffs(mask) - 1;  // −1 for none
      const int channel = word / 2 * 64 + 2 * pair + word % 2;
      const bool exists = pair >= 0 && token < at.rows;
      float decay = exists ? limited_gate(*p.g.at(at.i_b, t, i_h, by_head ? 0 : channel)) : 0.0F;
      const float k = exists ? key_factor * to_float(*p.k.at(at.i_b, t, i_q, channel)) : 0.0F;
      const float row = exists ? row_factor * to_float(*x.at(at.i_b, t, i_q, channel)) : 0.0F;
#pragma unroll
      for (int offset = 1; offset < kBlock; offset *= 2) {
        const float below = __shfl_up_sync(0xffffffffU, decay, offset, kBlock);
        decay += column >= offset ? below : 0.0F;
      }
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const float from = __shfl_sync(0xffffffffU, decay, i, kBlock),
                    of_row = __shfl_sync(0xffffffffU, row, i, kBlock);
        sums[i] += i >= column ? of_row * (k * exp2_fast(from - decay)) : 0.0F;
      }
    }
  }
  if (!any) return;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    sums[i] += __shfl_xor_sync(0xffffffffU, sums[i], kBlock);
    if (lane < kBlock) block[i * stride + column] = sums[i];
  }
  __syncwarp();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b != warp) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      products[8 * b + i] += block[(lane / 4 + i / 2 % 2 * 8) * stride + i / 4 * 8 + 2 * (lane % 4) + i % 2];
  }
  __syncwarp();
}

// Writes what key_vectors (prepare.cuh) writes, for a rule with two keys without decays in the vectors. `squares` is
// Σk² of the lane's token and `product` is κ·k, both before the L2 norm.
__device__ __forceinline__ void two_key_vectors(const DeltaRule& rule, float beta, float squares, float product,
                                                int warp, int lane, PrepareScratch& scratch, ChunkRecord& record) {
  const float n_k = rule.qk_l2norm ? rsqrtf(squares + static_cast<float>(kL2NormEpsilon)) : 1.0F;
  const float alpha = two_key_alpha(rule.step, beta, product * n_k * n_k);
  const float a = static_cast<float>(rule.step.erase_scale) * alpha * n_k;
  if (lane >= kBlock) return;
  const int t = kBlock * warp + lane;
  scratch.row[t] = -a;
  scratch.prefix[t] = 0;
  scratch.key_factor[t] = n_k;
  record.b[t] = static_cast<float>(rule.step.write_scale) * alpha;
  record.read[t] = a;
  record.write[t] = n_k;
  if (t == 0) record.decay = 1;
  if (lane == 0) record.growth[warp] = __int_as_float(0x7f800000);  // I − a k κᵀ may have a norm above 1
}

// Divides the factors of the warp's keys or queries by the powers of two that have multiplied their rows (make_units):
// `unit` the rows' own, and with two keys `key_unit` the keys'.
template <class E, bool kTwoKeys>
__device__ __forceinline__ void divide_by_unit(float unit, float key_unit, bool of_keys, int warp, int lane,
                                               PrepareScratch& scratch, ChunkRecord& record) {
  if (lane >= kBlock) return;
  const int t = kBlock * warp + lane;
  const float of_sweep = inverse_of_power(unit), of_products = of_sweep / kHeadroom<E>;
  if (of_keys) {
    const float of_written = kTwoKeys ? inverse_of_power(key_unit) : of_sweep;
    scratch.row[t] *= of_products;
    scratch.key_factor[t] *= kTwoKeys ? of_written / kHeadroom<E> : of_products;
    record.read[t] *= of_sweep;
    record.write[t] *= of_written;
  } else {
    scratch.query_factor[t] *= of_products;
    record.out[t] *= of_sweep;
  }
}

template <class E, int kTiles, bool kAligned, bool kTwoKeys>
__global__ void __launch_bounds__(kThreads, kAligned ? kResident<kTwoKeys> : 1)
    prepare_channel_kernel(const __grid_constant__ ChunkProblem<E> c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& memory = *reinterpret_cast<ChannelMemory<kTiles, kTwoKeys>*>(shared);
  constexpr int kPairs = 32 * kTiles;  // of channels
  const DeltaForward<E>& p = c.p;
  const int lane = threadIdx.x % 32, block = warp_of(threadIdx.x) / kTiles;
  const int channel = 2 * (static_cast<int>(threadIdx.x) % kPairs);
  const auto heads = static_cast<unsigned>(p.shape.value_heads);
  const std::int64_t slot = blockIdx.x / heads, i_h = blockIdx.x % heads;
#if __CUDA_ARCH__ >= 900
  let_next_kernel_begin();
#endif
  {
    const ChunkAt place = chunk_at(c, slot);
    if (place.rows == 0) return;
    if (threadIdx.x == 0) memory.at = place;
    Channels<kTwoKeys> x;
    if (block < kBlocks) {
      read_channels<kAligned>(c, place, i_h, block, channel, x);
      share_channels<E>(x, block, channel, lane, memory);
    }
    __syncthreads();
    auto& scaled = reinterpret_cast<ScaledRows<kTiles>*>(c.scaled)[slot * p.shape.value_heads + i_h];
    if (block < kBlocks) {
      if constexpr (kUnitRows<E>) make_units<E>(x, block, lane, p.rule.qk_l2norm, memory);
      scale_channels<E>(x, block, channel, lane, memory, scaled);
    }
    __syncthreads();
  }
  const ChunkAt& at = memory.at;
  // Warps 0 to 3 compute T from the keys, warps 4 to 7 compute P from the queries. Each has a block row.
  const int warp = warp_of(threadIdx.x) % kBlocks;
  const bool of_keys = threadIdx.x < kThreads / 2;
  const int t = kBlock * warp + lane % kBlock;
  const Token token{t < at.rows ? to_float(*p.beta.at(at.i_b, at.start + t, i_h)) : 0.0F, 0, 0, 0};
  BlockProducts products;
  multiply_channels<E>(of_keys ? memory.rows.keys : memory.rows.queries, memory, warp, lane, products);
  __syncthreads();
  PrepareScratch& scratch = memory.products.scratch;
  constexpr int kStride = sizeof(scratch.matrix[0]) / sizeof(float);
  ChunkRecord& record = memory.products.record;
  const auto squares_of = [&](int first) {
    float sum = 0;
    for (int tile = 0; tile < kTiles; ++tile) sum += memory.squares[tile][warp][first + lane % kBlock];
    return sum;
  };
  const auto unit = [&](int first) { return kUnitRows<E> ? unit_of(squares_of(first), p.rule.qk_l2norm) : 1.0F; };
  const float key_unit = unit(kBlock * kKeySquares), row_unit = !of_keys   ? unit(kBlock * kQuerySquares)
                                                                : kTwoKeys ? unit(kBlock * kEraseSquares)
                                                                           : key_unit;
  add_deep_channels(c,
                    !of_keys   ? p.q
                    : kTwoKeys ? p.erase_key
                               : p.k,
                    kHeadroom<E> * row_unit, kHeadroom<E> * key_unit, at, i_h, warp, lane, memory,
                    &scratch.matrix[kBlock * warp][of_keys ? 0 : 2 * kBlock], kStride, products);
  if (of_keys) {
    clear_upper_blocks(record, threadIdx.x);
    if constexpr (kTwoKeys) {
      two_key_vectors(p.rule, token.beta, squares_of(kBlock * kKeySquares), squares_of(kBlock * kEraseKey), warp, lane,
                      scratch, record);
    } else {
      key_vectors(p.rule, token, squares_of(kBlock * kKeySquares), warp, lane, scratch, record);
    }
  } else {
    query_vectors(p.rule, c.scale, token, squares_of(kBlock * kQuerySquares), warp, lane, scratch, record);
  }
  if constexpr (kUnitRows<E>) divide_by_unit<E, kTwoKeys>(row_unit, key_unit, of_keys, warp, lane, scratch, record);
  __syncthreads();
  if (of_keys) {
    write_keys<E>(products, warp, lane, scratch);
    __syncwarp();
    invert_diagonal(warp, lane, scratch);
  } else {
    const auto blocks_of = [&](int b, float(&blocks)[16]) {
#pragma unroll
      for (int i = 0; i < 16; ++i) blocks[i] = products[8 * b + i];
    };
    write_queries<E>(blocks_of, warp, lane, scratch, record);
  }
  __syncthreads();
  if (of_keys) invert_below<E>(warp, lane, scratch, record);
  fence_record();
  __syncthreads();
  store_record<kThreads>(record, &c.records[slot * p.shape.value_heads + i_h], threadIdx.x);
  wait_for_record(threadIdx.x);
}

template <int kTiles, bool kAligned, bool kTwoKeys, class E>
void launch(const ChunkProblem<E>& c, cudaStream_t stream) {
  constexpr int kBytes = sizeof(ChannelMemory<kTiles, kTwoKeys>);
  const auto kernel = prepare_channel_kernel<E, kTiles, kAligned, kTwoKeys>;
  launch_kernel("prepare_channel", kernel, grid_of("chunk_fwd", c.slots * c.p.shape.value_heads), kThreads, kBytes,
                stream, c);
}

template <bool kAligned, bool kTwoKeys, class E>
void launch(const ChunkProblem<E>& c, cudaStream_t stream) {
  c.p.shape.key_dim <= 64 ? launch<1, kAligned, kTwoKeys>(c, stream) : launch<2, kAligned, kTwoKeys>(c, stream);
}

}  // namespace

template <class E>
void launch_prepare_channel(const ChunkProblem<E>& c, cudaStream_t stream) {
  const bool gates = c.g_rows || c.p.rule.decay != Decay::channel, rows = c.q_rows && c.k_rows && gates;
  if (c.p.rule.two_keys) {
    return rows && c.erase_rows ? launch<true, true>(c, stream) : launch<false, true>(c, stream);
  }
  rows ? launch<true, false>(c, stream) : launch<false, false>(c, stream);
}

template void launch_prepare_channel(const ChunkProblem<bfloat16>&, cudaStream_t);
template void launch_prepare_channel(const ChunkProblem<float16>&, cudaStream_t);

}  // namespace efla::gpu
