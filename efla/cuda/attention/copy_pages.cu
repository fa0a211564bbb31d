// Copies of keys and values to and from pages (attention_step.h). A thread block per token and head.
#include "efla/cuda/attention/attention_step.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"

namespace efla::gpu {
namespace {

constexpr int kThreads = 128;

template <class S>
__global__ void copy_pages_kernel(const __grid_constant__ PageCopy<S> p) {
  const std::int64_t groups = p.shape.key_value_heads, n = blockIdx.x / groups, g = blockIdx.x % groups;
  const std::int64_t page_tokens = p.shape.page_tokens, token = p.positions(n), at = token % page_tokens;
  S* const page = p.table.pages(p.slots(n), token / page_tokens);
  S* const keys = page + p.table.key_offset + g * p.shape.key_dim * page_tokens + at;
  S* const values = page + p.table.value_offset + (g * page_tokens + at) * p.shape.value_dim;
  const auto copy = [&](S& in_page, S& own) {
    if (p.to_pages) {
      in_page = own;
    } else {
      own = in_page;
    }
  };
  for (std::int64_t i = threadIdx.x; i < p.shape.key_dim; i += kThreads) copy(keys[i * page_tokens], p.keys(n, g, i));
  for (std::int64_t j = threadIdx.x; j < p.shape.value_dim; j += kThreads) copy(values[j], p.values(n, g, j));
}

}  // namespace

template <class S>
void copy_pages(const PageCopy<S>& p, cudaStream_t stream) {
  const std::int64_t blocks = p.slots.extent[0] * p.shape.key_value_heads;
  if (blocks == 0) return;
  copy_pages_kernel<S><<<grid_of("copy_pages", blocks), kThreads, 0, stream>>>(p);
  check_launch("copy_pages");
}

template void copy_pages(const PageCopy<float>&, cudaStream_t);
template void copy_pages(const PageCopy<bfloat16>&, cudaStream_t);

}  // namespace efla::gpu
