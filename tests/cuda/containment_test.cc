// What a NaN token reaches (docs/numerics.md): by chunks its own chunk beside what it reaches in the recurrence, and by
// the recurrence only that.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "efla/cuda/chunk/chunk.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/float32/float32.h"
#include "tests/cuda/device.h"
#include "tests/support/delta_case.h"
#include "tests/support/delta_results.h"
#include "tests/support/reach.h"

namespace efla::test {
namespace {

// Return what computes the outputs and the gradients of a case.
template <class E>
auto by_chunks(gpu::ChunkKernel kernel) {
  return [kernel](DeltaData<E>& host) {
    const DeviceData<E> device(host);
    const SavedStatesOnDevice states(host.shape, 2 * gpu::kChunkTokens);
    const PoisonedWorkspace forward(gpu::chunk_fwd_workspace_bytes(host.shape, host.rule)),
        backward(gpu::chunk_bwd_workspace_bytes(host.shape, host.rule));
    gpu::chunk_fwd(states.in(device.forward()), forward.get(), nullptr, kernel);
    gpu::chunk_bwd(states.in(device.backward()), backward.get(), nullptr, kernel);
    device.download();
    return all_results(host);
  };
}

auto by_chunks_of_float32() {
  return [](DeltaData<float>& host) {
    const DeviceData<float> device(host);
    const SavedStatesOnDevice states(host.shape, 2 * gpu::kFloat32Tokens);
    const PoisonedWorkspace forward(gpu::chunk_float32_fwd_workspace_bytes(host.shape, host.rule)),
        backward(gpu::chunk_float32_bwd_workspace_bytes(host.shape, host.rule));
    gpu::chunk_float32_fwd(states.in(device.forward()), forward.get(), nullptr);
    gpu::chunk_float32_bwd(states.in(device.backward()), backward.get(), nullptr);
    device.download();
    return all_results(host);
  };
}

template <class T>
auto by_recurrence() {
  return [](DeltaData<T>& host) {
    const DeviceData<T> device(host);
    const PoisonedWorkspace workspace(gpu::recurrent_bwd_workspace_bytes(host.shape, host.rule));
    gpu::recurrent_fwd(device.forward(), nullptr);
    gpu::recurrent_bwd(device.backward(), workspace.get(), nullptr);
    device.download();
    return all_results(host);
  };
}

// Checks a case with all kernels of chunks that take it, with inputs of bfloat16 and of float16.
void expect_contained_chunks(const DeltaCase& c, const std::vector<TokenAt>& tokens) {
  using enum gpu::ChunkKernel;
  for (const auto& [name, kernel] : {std::pair{"portable", portable}, {"sweep", sweep}, {"fused", fused}}) {
    if (kernel == portable ? gpu::divides_keys(c.shape()) : !gpu::is_hopper()) continue;
    const bool decays_rows = c.decay == Decay::channel || c.erase_key != EraseKey::none;
    if (kernel == portable && decays_rows && !gpu::is_hopper()) continue;
    SCOPED_TRACE(name);
    expect_contained<bfloat16>(c, gpu::kChunkTokens, tokens, by_chunks<bfloat16>(kernel));
    expect_contained<float16>(c, gpu::kChunkTokens, tokens, by_chunks<float16>(kernel));
  }
}

// Sequences that end within a chunk, whose last chunk shares its place in memory with the next sequence's first tokens.
DeltaCase packed(Decay decay, std::int64_t keys, std::int64_t group = 1) {
  DeltaCase c{"exact", 1, 1, true, 1, 300, 2, keys, 64, 1, Layout::contiguous, true, true, true};
  c.cu_seqlens = {0, 80, 230, 300};
  c.decay = decay;
  c.gate = 0.1;
  c.group = group;
  return c;
}

// The first and the last token of sequence 1, and one in its second chunk.
const std::vector<TokenAt> kTokens{{1, 0}, {1, 70}, {1, 149}};

TEST(CudaContainment, Chunks) {
  for (const Decay decay : {Decay::none, Decay::scalar}) expect_contained_chunks(packed(decay, 128), kTokens);
  expect_contained_chunks(packed(Decay::scalar, 64, 2), kTokens);
}

TEST(CudaContainment, ChunksOfChannelGates) {
  expect_contained_chunks(packed(Decay::channel, 128), kTokens);
  expect_contained_chunks(packed(Decay::channel, 64, 2), kTokens);
}

DeltaCase packed_with_two_keys(Decay decay, std::int64_t keys, std::int64_t group) {
  DeltaCase c = packed(decay, keys, group);
  c.erase_key = EraseKey::gated;
  return c;
}

TEST(CudaContainment, TwoKeys) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    const DeltaCase c = packed_with_two_keys(decay, 64, 2);
    expect_contained_chunks(c, kTokens);
    expect_contained<float>(c, gpu::kFloat32Tokens, kTokens, by_chunks_of_float32());
    expect_contained<float>(c, 1, kTokens, by_recurrence<float>());
  }
  expect_contained_chunks(packed_with_two_keys(Decay::scalar, 128, 1), kTokens);
}

TEST(CudaContainment, DividedKeys) { expect_contained_chunks(packed(Decay::scalar, 256), kTokens); }

// Sequences that are cut into segments: the first token of a segment, and one within.
TEST(CudaContainment, Segments) {
  for (const Decay decay : {Decay::scalar, Decay::channel}) {
    DeltaCase c{"exact", 1, 1, true, 1, 4200, 1, 64, 64, 1, Layout::contiguous, true, true, true};
    c.cu_seqlens = {0, 2100, 4200};
    c.decay = decay;
    c.gate = 0.05;
    const std::int64_t segment =
        gpu::segment_chunks(gpu::chunk_slots(c.shape()) / 2, gpu::segments_of(c.shape())) * gpu::kChunkTokens;
    ASSERT_LT(2 * segment, 2100);
    expect_contained_chunks(c, {{1, segment}, {0, segment + 100}});
  }
}

TEST(CudaContainment, Float32) {
  for (const std::int64_t keys : {64, 128}) {
    for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel})
      expect_contained<float>(packed(decay, keys), gpu::kFloat32Tokens, kTokens, by_chunks_of_float32());
    expect_contained<float>(packed(Decay::channel, keys, 2), gpu::kFloat32Tokens, kTokens, by_chunks_of_float32());
  }
}

TEST(CudaContainment, Recurrence) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel})
    expect_contained<float>(packed(decay, 64, 2), 1, kTokens, by_recurrence<float>());
  expect_contained<bfloat16>(packed(Decay::scalar, 128), 1, kTokens, by_recurrence<bfloat16>());
}

}  // namespace
}  // namespace efla::test
