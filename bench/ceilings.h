// What the machine can do at most, measured in the same turns as the contenders.
#pragma once

#include <cstdint>
#include <functional>

#include "efla/base/threads.h"

namespace efla::bench {

// LibTorch's float32 product of two 1024 × 1024 matrices.
inline constexpr double kMatrixFlops = 2.0 * 1024 * 1024 * 1024;
std::function<void()> matrix_product();

// Larger than any cache here.
inline constexpr std::int64_t kLargeBytes = std::int64_t{256} << 20;

// Reads and writes every float of `bytes` of memory in place, split evenly over the pool's threads: what a decode step
// does to its states. 2 · bytes move.
std::function<void()> memory_stream(std::int64_t bytes, ThreadPool& pool);

}  // namespace efla::bench
