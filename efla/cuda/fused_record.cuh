// The record of a chunk (prepare.cuh), computed by two warpgroups beside the sweep that uses it: one T, the other P.
#pragma once

#include "efla/cuda/sweep_sm90.cuh"
#include "efla/cuda/wgmma.cuh"

namespace efla::gpu {

// The warpgroup that computes T and the vectors of the keys.
template <int kTiles, int kGroups>
__device__ __forceinline__ void prepare_keys(const ChunkProblem& c, int thread,
                                             Shared<kTiles, kGroups, true, false>& shared) {
  const Walk& walk = shared.walk;
  using Memory = Shared<kTiles, kGroups, true, false>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords;
  const int warp = warp_of(thread);
  const bool gated = c.p.rule.decay == Decay::scalar;
  PrepareScratch& scratch = shared.scratch[0];
  BlockProducts keys;
  leave_undefined(keys);
  for (auto& record : shared.record) clear_upper_blocks(record, thread);
  named_barrier(kRecordBarrier, 2 * kGroupThreads);
  // The products of the next chunk are made while this chunk's record is finished; after the last one, its own again.
  const auto start_keys = [&](int chunk) {
    barrier_wait(&shared.rows_full[chunk % kStages], parity(chunk, kStages));
    const std::uint32_t k_tile = shared_address(shared.rows[chunk % kStages].k);
    start_products<kTiles>(k_tile, k_tile, warp, thread % 32, keys);
  };
  if (walk.chunks == 0) return;
  start_keys(0);
  finish_products(keys);
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int lane = opaque(thread % 32);
    ChunkRecord& record = shared.record[chunk % kRecords];
    const Token token = shared.tokens[chunk % 2][16 * warp + lane % 16];
    barrier_wait(&shared.record_free[chunk % kRecords], parity(chunk, kRecords) ^ 1U);
    key_vectors(c.p.rule, token, key_squares(keys, warp, lane), warp, lane, scratch, record);
    named_barrier(kRecordBarrier, 2 * kGroupThreads);
    write_keys(keys, gated, warp, lane, scratch);
    __syncwarp();
    invert_diagonal(warp, lane, scratch);
    named_barrier(kKeysBarrier, kGroupThreads);
    invert_below(warp, lane, scratch, record);
    start_keys(min(chunk + 1, walk.chunks - 1));
    fence_for_products();
    named_barrier(kRecordBarrier, 2 * kGroupThreads);
    if (thread == 0) barrier_arrive(&shared.record_full[chunk % kRecords]);
    finish_products(keys);
  }
}

// The warpgroup that computes P and the vectors of the queries, reads β and g, and copies rows.
template <int kTiles, int kGroups>
__device__ __forceinline__ void prepare_queries(const ChunkProblem& c, const RowMaps& maps, int thread,
                                                Shared<kTiles, kGroups, true, false>& shared) {
  const Walk& walk = shared.walk;
  using Memory = Shared<kTiles, kGroups, true, false>;
  constexpr int kStages = Memory::kStages, kRecords = Memory::kRecords;
  const int warp = warp_of(thread);
  const bool gated = c.p.rule.decay == Decay::scalar;
  PrepareScratch& scratch = shared.scratch[0];
  if (thread == 0) start_rows<true>(c, maps, 0, shared);
  const auto tokens_of = [&](int chunk) {
    return read_tokens(c.p, walk.beta, walk.g, chunk * kChunkTokens, walk.end - walk.begin, opaque(thread % 32));
  };
  const auto share_token = [&](const TokenPair& pair, int chunk, int lane) {
    const Token token = token_of(pair, gated, warp, lane);
    if (lane < 16) shared.tokens[chunk % 2][16 * warp + lane] = token;
  };
  share_token(tokens_of(0), 0, thread % 32);
  TokenPair next = tokens_of(1);
  if (warp == 0 && is_tail(0, shared)) finish_tail(thread % 32, shared);
  named_barrier(kRecordBarrier, 2 * kGroupThreads);
#pragma unroll 1
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int lane = opaque(thread % 32);
    auto& rows = shared.rows[chunk % kStages];
    ChunkRecord& record = shared.record[chunk % kRecords];
    if (thread == 0) start_rows<true>(c, maps, chunk + 1, shared);
    __syncwarp();
    share_token(next, chunk + 1, lane);
    next = tokens_of(chunk + 2);
    barrier_wait(&shared.rows_full[chunk % kStages], parity(chunk, kStages));
    const std::uint32_t k_tile = shared_address(rows.k), q_tile = shared_address(rows.q);
    const float squares = c.p.rule.qk_l2norm ? query_squares<kTiles>(q_tile, warp, lane) : 0.0F;
    barrier_wait(&shared.record_free[chunk % kRecords], parity(chunk, kRecords) ^ 1U);
    query_vectors(c.p.rule, c.scale, shared.tokens[chunk % 2][16 * warp + lane % 16], squares, warp, lane, scratch,
                  record);
    named_barrier(kRecordBarrier, 2 * kGroupThreads);
    const auto blocks_of = [&](int b, float(&blocks)[16]) {
      multiply_blocks<kTiles>(q_tile, k_tile, b, warp, lane, blocks);
    };
    write_queries(blocks_of, gated, warp, lane, scratch, record);
    if (warp == 0 && is_tail(chunk + 1, shared)) finish_tail(lane, shared);
    fence_for_products();
    named_barrier(kRecordBarrier, 2 * kGroupThreads);
  }
}

}  // namespace efla::gpu
