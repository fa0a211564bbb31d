#include "bench/op/ceilings.h"

#include <ATen/ATen.h>

#include <memory>
#include <numeric>

#include "bench/machine.h"

namespace efla::bench {
namespace {

// Uses the widest vectors of the processor, because instructions would limit the rate in the cache otherwise.
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void update_in_place(float* data, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) data[i] = 1.0F - data[i];
}

// Returns the sum of numbers whose count is a multiple of 64, in 64 partial sums, so that no addition waits for the
// previous one.
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
float sum_of(const float* data, std::int64_t count) {
  float sums[64] = {};
  for (std::int64_t i = 0; i < count; i += 64) {
    for (std::int64_t j = 0; j < 64; ++j) sums[j] += data[i + j];
  }
  return std::accumulate(sums, sums + 64, 0.0F);
}

}  // namespace

std::function<void()> matrix_product(int threads) {
  const at::Tensor a = at::full({1024, 1024}, 0.5F), b = at::full({1024, 1024}, 0.25F);
  at::Tensor c = at::empty({1024, 1024});
  return [=]() mutable {
    use_blas_threads(threads);
    at::mm_out(c, a, b);
  };
}

std::function<void()> memory_stream(std::int64_t bytes, ThreadPool& pool) {
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(float));
  const at::Tensor values = at::ones({count}, at::kFloat);
  return [values, count, &pool] {
    auto* data = values.data_ptr<float>();
    const std::int64_t parts = pool.threads();
    pool.run(parts, [=](std::int64_t part, int) {
      const std::int64_t begin = count * part / parts;
      update_in_place(data + begin, count * (part + 1) / parts - begin);
    });
  };
}

std::function<void()> memory_read(std::int64_t bytes, ThreadPool& pool) {
  const std::int64_t blocks = bytes / static_cast<std::int64_t>(64 * sizeof(float));
  const at::Tensor values = at::ones({64 * blocks}, at::kFloat), sums = at::empty({pool.threads()}, at::kFloat);
  return [values, sums, blocks, &pool] {
    const auto* data = values.data_ptr<float>();
    auto* sum = sums.data_ptr<float>();
    const std::int64_t parts = pool.threads();
    pool.run(parts, [=](std::int64_t part, int) {
      const std::int64_t begin = blocks * part / parts, end = blocks * (part + 1) / parts;
      sum[part] = sum_of(data + 64 * begin, 64 * (end - begin));
    });
  };
}

}  // namespace efla::bench
