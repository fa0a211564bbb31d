// Computes the records of chunks (prepare.cuh) in the fused kernel, with two warpgroups of the sweep's thread block.
// One warpgroup computes the vectors of the keys, −A and the inverses of the diagonal blocks of I + A. The other one
// computes the vectors of the queries, P and T. "One kernel" in docs/design/2026-11-cuda-forward.md explains the
// division.
#pragma once

#include "efla/cuda/chunk/sweep/walk_sm90.cuh"
#include "efla/cuda/common/wgmma.cuh"

namespace efla::gpu {

// Returns β and g of a chunk's tokens, two tokens per lane.
template <int kTiles, int kGroups, class E>
__device__ __forceinline__ TokenPair<E> tokens_of(const ChunkProblem<E>& c, int chunk, int lane,
                                                  const Shared<kTiles, kGroups, true, false>& shared) {
  const Walk& walk = shared.walk;
  return read_tokens(c.p, static_cast<const E*>(walk.beta), walk.g, chunk * kChunkTokens, walk.end - walk.begin, lane);
}

// Chunks whose tokens are computed before the warpgroups begin.
inline constexpr int kFirstTokens = 2;

// Starts the copies of the first chunk's rows and computes the decays of the first kFirstTokens chunks. Run by one warp
// before the warpgroups begin.
template <int kTiles, int kGroups, class E>
__device__ __forceinline__ void start_records(const ChunkProblem<E>& c, const RowMaps& maps, int lane,
                                              Shared<kTiles, kGroups, true, false>& shared) {
  if (lane == 0) start_rows<true>(c, maps, 0, shared);
  __syncwarp();
  TokenPair<E> pairs[kFirstTokens];
#pragma unroll
  for (int chunk = 0; chunk < kFirstTokens; ++chunk) pairs[chunk] = tokens_of(c, chunk, lane, shared);
#pragma unroll
  for (int chunk = 0; chunk < kFirstTokens; ++chunk) {
    share_tokens(pairs[chunk], c.p.rule.decay == Decay::scalar, lane, shared.tokens[chunk]);
  }
}

// Waits for the tokens of a chunk and returns token t.
template <int kTiles, int kGroups>
__device__ __forceinline__ Token wait_for_token(int chunk, int t, Shared<kTiles, kGroups, true, false>& shared) {
  const int stage = chunk % kTokenStages;
  if (chunk >= kFirstTokens)
    barrier_wait(&shared.tokens_full.at[stage], shared.tokens_full.parity(chunk - kFirstTokens));
  return shared.tokens[stage][t];
}

// Runs the warpgroup that computes the vectors of the keys, −A and the inverses of the diagonal blocks of I + A.
template <int kTiles, int kGroups, class E>
__device__ __forceinline__ void prepare_keys(const ChunkProblem<E>& c, int thread,
                                             Shared<kTiles, kGroups, true, false>& shared) {
  const Walk& walk = shared.walk;
  using Memory = Shared<kTiles, kGroups, true, false>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords;
  const int warp = warp_of(thread);
  BlockProducts keys;
  leave_undefined(keys);
  const auto start_keys = [&](int chunk) {
    wait_for_rows(chunk, walk.tail, shared);
    const std::uint32_t k_tile = shared_address(shared.rows[chunk % kStages].k);
    start_products<E, kTiles>(k_tile, k_tile, warp, thread % 32, keys);
  };
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int lane = opaque(thread % 32);
    ChunkRecord& record = shared.record[chunk % kRecords];
    PrepareScratch& scratch = shared.scratch[chunk % kRecords];
    start_keys(chunk);
    const Token token = wait_for_token(chunk, 16 * warp + lane % 16, shared);
    shared.record_ring.wait_free(chunk);
    finish_products(keys);
    key_vectors(c.p.rule, token, key_squares(keys, warp, lane), warp, lane, scratch, record);
    shared.vectors_full.arrive(chunk);
    named_barrier(kKeysBarrier, kGroupThreads);
    write_keys<E>(keys, warp, lane, scratch);
    __syncwarp();
    invert_diagonal(warp, lane, scratch);
    shared.diagonal_full.arrive(chunk);
  }
}

// Runs the warpgroup that computes P, the vectors of the queries and T, reads β and g, and copies rows.
template <int kTiles, int kGroups, class E>
__device__ __forceinline__ void prepare_queries(const ChunkProblem<E>& c, const RowMaps& maps, int thread,
                                                Shared<kTiles, kGroups, true, false>& shared) {
  const Walk& walk = shared.walk;
  using Memory = Shared<kTiles, kGroups, true, false>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords;
  const int warp = warp_of(thread);
  const bool gated = c.p.rule.decay == Decay::scalar;
  for (auto& record : shared.record) clear_upper_blocks(record, thread);
  // Warp 2 computes the decays of all tokens, and warp 3 copies rows, because they have the fewest blocks of T.
  TokenPair<E> next{};
  if (warp == 2) next = tokens_of(c, kFirstTokens, thread % 32, shared);
  if (warp == 3 && is_tail(0, shared)) finish_tail(thread % 32, shared);
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int lane = opaque(thread % 32);
    auto& rows = shared.rows[chunk % kStages];
    ChunkRecord& record = shared.record[chunk % kRecords];
    PrepareScratch& scratch = shared.scratch[chunk % kRecords];
    if (warp == 3) {
      if (lane == 0) start_rows<true>(c, maps, chunk + 1, shared);
      __syncwarp();
    }
    wait_for_rows(chunk, walk.tail, shared);
    const std::uint32_t k_tile = shared_address(rows.k), q_tile = shared_address(rows.q);
    const float squares = c.p.rule.qk_l2norm ? query_squares<E, kTiles>(q_tile, warp, lane) : 0.0F;
    shared.record_ring.wait_free(chunk);
    query_vectors(c.p.rule, c.scale, wait_for_token(chunk, 16 * warp + lane % 16, shared), squares, warp, lane, scratch,
                  record);
    __syncwarp();
    BlockProducts queries;
    leave_undefined(queries);
    start_products<E, kTiles>(q_tile, k_tile, warp, lane, queries);
    shared.vectors_full.wait(chunk);
    finish_products(queries);
    const auto blocks_of = [&](int b, float(&blocks)[16]) {
#pragma unroll
      for (int i = 0; i < 16; ++i) blocks[i] = queries[8 * b + i];
    };
    write_queries<E>(blocks_of, warp, lane, scratch, record);
    chunk = opaque(chunk);  // opaque, because registers are scarce for addresses kept until here
    if (warp == 3 && is_tail(chunk + 1, shared)) finish_tail(lane, shared);
    if (warp == 2) {
      share_tokens(next, gated, lane, shared.tokens[(chunk + kFirstTokens) % kTokenStages]);
      shared.tokens_full.arrive(chunk + kFirstTokens);
      next = tokens_of(c, chunk + kFirstTokens + 1, lane, shared);
    }
    shared.diagonal_full.wait(chunk);
    invert_below<E>(warp, lane, scratch, record);
    fence_async_proxy();
    shared.record_ring.full.arrive(chunk);
  }
}

}  // namespace efla::gpu
