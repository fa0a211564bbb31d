// The bounds by which the launchers choose kernels and divide work, one sentence each. A wrong bound costs time, never
// correctness; only kMostWeights and kWideBands also keep blocks within the shared memory, without which a launch
// fails. Where a choice changes the order of sums, the sizes of the problem alone decide, so that the bits of results
// do not depend on the size of the GPU.
#pragma once

#include <cstdint>
#include <type_traits>

namespace efla::gpu {

// The multiprocessors of an H200, for which kernels and numbers of thread blocks are chosen on every GPU.
inline constexpr std::int64_t kMultiprocessors = 132;

// Returns how many times `blocks` thread blocks fill kMultiprocessors, with one block per multiprocessor.
constexpr std::int64_t waves_of(std::int64_t blocks) { return (blocks + kMultiprocessors - 1) / kMultiprocessors; }

// Below this number of tokens per sequence the token recurrence is faster than chunks of inputs of type T.
template <class T>
inline constexpr std::int64_t kFewestChunkTokens = std::is_same_v<T, float> ? 16 : 8;

// Returns whether the fused kernel of the chunk forward is faster than `prepare` and a sweep: its thread blocks fill at
// least seven tenths of the multiprocessors, once or several times.
constexpr bool fills_multiprocessors(std::int64_t blocks) {
  return 10 * blocks >= 7 * kMultiprocessors * waves_of(blocks);
}

// Sequences, or their segments, times value heads: from this number on a thread block of a sweep has 128 value columns
// instead of 64, because only with fewer do twice as many blocks of 64 columns occupy more multiprocessors.
inline constexpr std::int64_t kManyHeads = 96;

// The segments of a sequence, at most (chunk/sweep/segments.cc); a segment begins with a product per earlier segment.
inline constexpr int kMostSegments = 8;

// Estimates the other costs of cutting a sequence into segments, in units of one chunk of the sweep: the second launch
// and the products with the maps.
constexpr std::int64_t segments_cost(int segments) { return 7 + 2 * segments; }

// Chunks that a sweep of the backward counts together, because the fence before a count is slow.
inline constexpr int kCountedTogether = 4;

// The clocks for which a thread block of the reverse sweep waits for the other block of its pair of multiprocessors
// before it claims a walk for itself (claim_walk in chunk/sweep/backward_sm90.cu).
inline constexpr long long kClaimPatience = 50'000;

// Returns whether thread blocks on all multiprocessors claim the walks of the reverse sweep in pairs (claim_walk),
// which pays if the walks need at most half of the multiprocessors.
constexpr bool claims_walks(unsigned walks, unsigned multiprocessors) { return 2 * walks <= multiprocessors; }

// The thread blocks of the recurrence's backward, at most: two per multiprocessor, because each has the states of an
// interval in its own part of the workspace.
inline constexpr std::int64_t kMostRecurrentBlocks = 2 * kMultiprocessors;

// From this number of tokens per call on, a decode step keeps states in registers (recurrent/step_registers.cu); with
// fewer tokens step.cu is faster, because it has more thread blocks per multiprocessor.
inline constexpr int kFewestRegisterTokens = 4;

// The rows that a group of threads of a norm's forward computes one after another, at most.
inline constexpr std::int64_t kMostGroupRows = 8;

// Groups of a norm's forward compute several rows only if this many thread blocks remain.
inline constexpr std::int64_t kFullGrid = 1024;

// The parts of the gradient of a norm's weight, at most, one per thread block: multiples of the multiprocessors.
inline constexpr std::int64_t kMostNormParts = 8 * kMultiprocessors, kMostAddNormParts = 6 * kMultiprocessors;

// The thread blocks of decay_gate, at most: four per multiprocessor run at once.
inline constexpr std::int64_t kMostGateBlocks = 4 * kMultiprocessors;

// With fewer thread blocks of long strips than this, short_conv takes short strips, because most of a GPU would be
// idle.
inline constexpr std::int64_t kFewConvBlocks = 256;

// The bytes of weights of a thread block of `linear` for few rows, at most: the blocks of two products, one of which
// copies while the other computes, then fit in the 227 KB of a Hopper multiprocessor, with 9 KB each for x and sums.
inline constexpr int kMostWeights = 104 * 1024;

// A product of `linear` whose blocks would exceed kMostWeights is divided into blocks of at most this many bytes.
inline constexpr int kDividedWeights = 64 * 1024;

// Up to this number of outputs, `linear` for many rows takes tiles of 64, because they occupy the multiprocessors at
// most once.
inline constexpr int kFewOutputs = 1024;

// Up to this number of bands of x, clusters of four thread blocks of `linear` for many rows have enough shared memory.
inline constexpr int kWideBands = 16;

}  // namespace efla::gpu
