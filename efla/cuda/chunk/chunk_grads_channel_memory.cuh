// What a thread block has in shared memory for the gradients where every key channel has a gate
// (chunk_grads_channel_sm90.cu, which has the equations).
#pragma once

#include <cstdint>

#include "efla/cuda/chunk/channels.cuh"
#include "efla/cuda/common/tile.cuh"

namespace efla::gpu {

inline constexpr int kEdgeRows = kBlock * (kBlocks - 1), kEdgeBytes = kEdgeRows * 128;
inline constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;  // of a block and an earlier one
constexpr int pair_index(int block, int earlier) { return block * (block - 1) / 2 + earlier; }

// Sums over the channels of a token, of which every warp of the token's block has a part: first Σk² and Σq², then k·E
// and the products of q and k with the gradients that the L2 norm projects.
enum ChannelSum { kErase, kAlongQuery, kAlongKey, kSums, kKeySquares = kErase, kQuerySquares = kAlongQuery };

// Terms of gates' gradients that span whole blocks: what a block's tokens read from before an earlier block (of that
// block and the earlier one), what a block's tokens write that dS' has, and S·dS'.
template <int kTiles>
struct Crossing {
  float read[kPairs][64 * kTiles], written[kBlocks - 1][64 * kTiles], states[64 * kTiles];
};

// The tiles of a slice: dO, U, D, S and dS'.
template <int kTiles>
struct ChannelSlice {
  unsigned char dout[kTileBytes], u[kTileBytes], d[kTileBytes], before[kTiles * kTileBytes], after[kTiles * kTileBytes];
};

// The rows of 64 channels: keys and queries; keys of all blocks but the last, decayed to their block's end; queries and
// −a∘keys of all but the first, decayed from their block's start.
struct ChannelTile {
  unsigned char k[kTileBytes], q[kTileBytes], keys[kEdgeBytes], queries[kEdgeBytes], erase[kEdgeBytes];
};

// A diagonal block of W and of H, element by element. The length of a row keeps stores of accumulators almost free of
// bank conflicts.
struct DiagonalBlock {
  float2 of[kBlock][kBlock + 2];
};

template <class E, int kTiles>
struct ChannelShared {
  static constexpr int kScratch = kBlock * 32;  // floats of 16 tokens and 32 channels
  static constexpr int kStages = 2;             // slices in shared memory at once
  static constexpr int kThreads = 256 * kTiles, kQuarters = 2 * kTiles;
  alignas(1024) ChannelSlice<kTiles> slices[kStages];
  ChannelTile tiles[kTiles];
  float decays[kChunkTokens][64 * kTiles];                                                       // of every token
  float decay[kBlocks][64 * kTiles];                                                             // over a block
  float key_factor[kChunkTokens], query_factor[kChunkTokens], squares[kChunkTokens];             // n_k, n_q, Σk²
  float key_unit[kUnitRows<E> ? kChunkTokens : 0], query_unit[kUnitRows<E> ? kChunkTokens : 0];  // of rows (unit_of)
  float a[kChunkTokens], b[kChunkTokens];
  float of_key[kChunkTokens], of_query[kChunkTokens];  // what is added of k and q to their gradients
  float sums[kSums][kQuarters][kChunkTokens];
  ChunkAt at;                   // here because registers are short
  std::uint64_t full[kStages];  // barriers: the images of a slice have been copied

  // In the place of slices that have been used: W and H below the diagonal blocks, what spans blocks, parts of S·dS',
  // one per warp; accumulators on their way from products to channels, dq̂ and E there and dk̂ in the place of decayed
  // rows; and the diagonal blocks of W and H.
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
