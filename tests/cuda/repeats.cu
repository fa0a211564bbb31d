#include "tests/cuda/repeats.h"

#include <algorithm>

#include "efla/cuda/common/error.h"

namespace efla::test {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(const Words& words) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((words.count + kThreads - 1) / kThreads, 1, 1024));
}

__device__ std::int64_t first_word() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }

// Mixes the bits of a number (the finalizer of MurmurHash3).
__device__ std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bU;
  x = (x ^ x >> 13) * 0xc2b2ae35U;
  return x ^ x >> 16;
}

__global__ void fill_kernel(Words words, Poison poison, std::uint32_t seed) {
  for (std::int64_t i = first_word(); i < words.count; i += std::int64_t{gridDim.x} * kThreads) {
    std::uint32_t word = 0;
    if (poison == Poison::nan) word = 0x7fc07fc0U;
    if (poison == Poison::ones) word = 0xffffffffU;
    if (poison == Poison::random) word = mixed(static_cast<std::uint32_t>(i) ^ mixed(seed));
    words.data[i] = word;
  }
}

__global__ void count_kernel(Words x, Words y, unsigned long long* count) {
  unsigned long long differing = 0;
  for (std::int64_t i = first_word(); i < x.count; i += std::int64_t{gridDim.x} * kThreads) {
    differing += x.data[i] != y.data[i] ? 1 : 0;
  }
  if (differing > 0) atomicAdd(count, differing);
}

}  // namespace

void fill(const Words& words, Poison poison, std::uint32_t seed) {
  fill_kernel<<<blocks_of(words), kThreads>>>(words, poison, seed);
  gpu::check_launch("fill_kernel");
}

void count_differing(const Words& x, const Words& y, unsigned long long* count) {
  count_kernel<<<blocks_of(x), kThreads>>>(x, y, count);
  gpu::check_launch("count_kernel");
}

}  // namespace efla::test
