// The limits of the machine, measured in interleaved runs with the contenders.
#pragma once

#include <cstdint>
#include <functional>

#include "efla/base/threads.h"

namespace efla::bench {

// Floating-point operations of one call of matrix_product's function.
inline constexpr double kMatrixFlops = 2.0 * 1024 * 1024 * 1024;
// Returns a function that computes LibTorch's float32 product of two 1024 × 1024 matrices. Each call sets the BLAS to
// `threads` threads, because other calls may have left it with one.
std::function<void()> matrix_product(int threads);

// Larger than any cache of the processors in bench/results.
inline constexpr std::int64_t kLargeBytes = std::int64_t{256} << 20;

// Returns a function that reads and writes every float of `bytes` of memory in place, distributed evenly over the
// pool's threads, as a decode step does with its states. It moves 2 · bytes.
std::function<void()> memory_stream(std::int64_t bytes, ThreadPool& pool);

// Returns a function that reads every float of `bytes` of memory, distributed evenly over the pool's threads, as a
// decode step does with keys and values. It moves `bytes`.
std::function<void()> memory_read(std::int64_t bytes, ThreadPool& pool);

}  // namespace efla::bench
