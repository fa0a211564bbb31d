// The shared memory of a thread block of the gradients where every key channel has a gate or the rule has two keys.
// grads_channel_sm90.cu defines the symbols.
#pragma once

#include <cstdint>

#include "efla/cuda/chunk/prepare/channels.cuh"
#include "efla/cuda/common/chunk_at.cuh"
#include "efla/cuda/common/grad_tail.cuh"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

// Rows that are decayed to or from the edge of their block, in all blocks but one.
inline constexpr int kEdgeRows = kBlock * (kBlocks - 1), kEdgeBytes = kEdgeRows * 128;
inline constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;  // pairs of a block and an earlier block
constexpr int pair_index(int block, int earlier) { return block * (block - 1) / 2 + earlier; }

// Sums over the channels of a token. Each warp of the token's block adds its 32 channels. First they are Σk² and Σq²,
// with two keys also κ·k and Σκ². Later they are k·E (with two keys κ·E), the products of q and k with their gradients,
// which the L2 norm needs, and with two keys the gradient of a gate per head.
enum ChannelSum {
  kErase,
  kAlongQuery,
  kAlongKey,
  kGate,
  kKeySquares = kErase,
  kQuerySquares = kAlongQuery,
  kEraseKey = kAlongKey,
  kEraseSquares = kGate
};

// Terms of the gates' gradients that span whole blocks, per channel. `read`: what the tokens of a block read from
// before an earlier block, per pair of blocks. `written`: what S' has of the writes of a block's tokens. `states`:
// S·dS'.
template <int kTiles>
struct Crossing {
  float read[kPairs][64 * kTiles], written[kBlocks - 1][64 * kTiles], states[64 * kTiles];
};

// The tiles of a slice of 64 value columns: dO, U, D, S (before) and dS' (after).
template <int kTiles>
struct ChannelSlice {
  unsigned char dout[kTileBytes], u[kTileBytes], d[kTileBytes], before[kTiles * kTileBytes], after[kTiles * kTileBytes];
};

// Rows of 64 channels. k, q: keys and queries. keys: the keys of all blocks but the last, decayed to the end of their
// block. queries, erase: queries and −a∘keys (with two keys −a∘κ) of all blocks but the first, decayed from the start
// of their block.
struct ChannelTile {
  unsigned char k[kTileBytes], q[kTileBytes], keys[kEdgeBytes], queries[kEdgeBytes], erase[kEdgeBytes];
};

// A diagonal block of W (x) and of H (y). The padding of a row avoids most bank conflicts of stores of accumulators.
struct DiagonalBlock {
  float2 of[kBlock][kBlock + 2];
};

// Stages, rows and vectors, and what replaces them later. A quarter is 32 channels.
template <class E, int kTiles, bool kTwoKeys>
struct ChannelShared {
  static constexpr int kSums = kTwoKeys ? kGate + 1 : kGate;
  static constexpr int kTwoKeyTokens = kTwoKeys ? kChunkTokens : 0;
  static constexpr int kScratch = kBlock * 32;  // floats of 16 tokens times 32 channels
  static constexpr int kStages = 2;             // slices in shared memory at once
  static constexpr int kThreads = 256 * kTiles, kQuarters = 2 * kTiles;
  alignas(1024) ChannelSlice<kTiles> slices[kStages];
  ChannelTile tiles[kTiles];
  float decays[kChunkTokens][64 * kTiles];                                            // of every token and channel
  float decay[kBlocks][64 * kTiles];                                                  // over a block
  float key_factor[kChunkTokens], query_factor[kChunkTokens], squares[kChunkTokens];  // n_k, n_q, Σk²
  float key_unit[kUnitRows<E> ? kChunkTokens : 0], query_unit[kUnitRows<E> ? kChunkTokens : 0];  // of rows (unit_of)
  float a[kChunkTokens], b[kChunkTokens];
  float of_key[kChunkTokens], of_query[kChunkTokens];  // factors: of_key k is added to dk, of_query q to dq
  KeySums<kSums, kQuarters, kChunkTokens> sums;
  ChunkAt at;                   // not in registers, because registers are scarce
  std::uint64_t full[kStages];  // barriers: the images of a slice have been copied
  // With two keys: κ·k, the factors of κ and the powers of two of its rows, and the factor of the other key in the
  // gradients of k and κ.
  float erase_key[kTwoKeyTokens], erase_factor[kTwoKeyTokens], erase_unit[kTwoKeyTokens], of_other_key[kTwoKeyTokens];

  // What replaces slices after the products of all slices: W and H below the diagonal blocks; Crossing; each warp's
  // part of S·dS'; each warp's accumulators of dq̂ and E on their way to one channel per lane; and the diagonal blocks.
  // The accumulators of dk̂ replace decayed rows (`keys`).
  __device__ unsigned char* w() { return slices[0].dout; }
  __device__ unsigned char* h() { return slices[0].u; }
  __device__ Crossing<kTiles>& crossing() { return *reinterpret_cast<Crossing<kTiles>*>(slices[0].d); }
  __device__ float* state_sums(int warp) { return reinterpret_cast<float*>(slices[0].before) + warp * 64 * kTiles; }
  __device__ float* queries(int warp) { return reinterpret_cast<float*>(slices[0].before) + 2 * warp * kScratch; }
  __device__ float* erase(int warp) { return queries(warp) + kScratch; }
  __device__ float* keys(int warp) {
    static_assert(2 * kBlocks * kScratch * sizeof(float) <= 3 * kEdgeBytes);
    return reinterpret_cast<float*>(tiles[warp / (2 * kBlocks)].keys) + warp % (2 * kBlocks) * kScratch;
  }
  __device__ DiagonalBlock& diagonal(int block) {
    static_assert(kThreads / 32 * 2 * kScratch * sizeof(float) + kBlocks * sizeof(DiagonalBlock) <=
                  kStages * sizeof(ChannelSlice<kTiles>) - 3 * kTileBytes);
    return reinterpret_cast<DiagonalBlock*>(queries(kThreads / 32))[block];
  }
};
static_assert(sizeof(Crossing<2>) <= kTileBytes);

}  // namespace efla::gpu
