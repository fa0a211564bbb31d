// The cross-entropy of rows of logits and its gradient. docs/ops/cross_entropy.md has the equations. One thread block
// per row reads the row twice, the second time mostly from the caches, and writes the gradient over the logits.
#include <cmath>

#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/pieces.cuh"
#include "efla/cuda/layers/cross_entropy.h"

namespace efla::gpu {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

// A sum Σ e^x, held as sum · e^largest so that it does not overflow.
struct ExpSum {
  float largest = -INFINITY, sum = 0;

  __device__ void add(const ExpSum& other) {
    const float most = fmaxf(largest, other.largest);
    if (most == -INFINITY) return;
    sum = sum * __expf(largest - most) + other.sum * __expf(other.largest - most);
    largest = most;
  }
  // Adds the sums of all lanes of the warp.
  __device__ void add_lanes() {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      add({__shfl_xor_sync(0xffffffffU, largest, offset), __shfl_xor_sync(0xffffffffU, sum, offset)});
    }
  }
};

template <int kVector, class T>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(const __grid_constant__ CrossEntropy<T> p) {
  __shared__ ExpSum shared[kWarps];
  const std::int64_t row = blockIdx.x, target = p.targets(row);
  const std::int64_t columns = p.logits.extent[1];
  T* logits = p.logits.at(row);
  const bool counts = target != kIgnoreIndex;
  if (!counts && !p.share) {
    if (threadIdx.x == 0) p.loss(row) = 0;
    return;
  }
  ExpSum total;
  for (std::int64_t v = threadIdx.x * kVector; v < columns; v += kThreads * kVector) {
    float x[kVector];
    load_piece(logits + v, x);
    ExpSum piece{x[0], 0};
#pragma unroll
    for (int j = 1; j < kVector; ++j) piece.largest = fmaxf(piece.largest, x[j]);
    if (piece.largest == -INFINITY) continue;
#pragma unroll
    for (int j = 0; j < kVector; ++j) piece.sum += __expf(x[j] - piece.largest);
    total.add(piece);
  }
  total.add_lanes();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
  __syncthreads();
  total = {};
  if (threadIdx.x % 32 < kWarps) total = shared[threadIdx.x % 32];
  total.add_lanes();
  const bool known = target >= 0 && target < columns;
  if (threadIdx.x == 0) {
    const float of_target = known ? to_float(logits[target]) : NAN;
    p.loss(row) = counts ? logf(total.sum) + total.largest - of_target : 0;
  }
  if (!p.share) return;
  __syncthreads();  // the target's logit has been read
  const float share = counts ? (known ? p.share(0) : NAN) : 0, scale = share / total.sum;
  for (std::int64_t v = threadIdx.x * kVector; v < columns; v += kThreads * kVector) {
    float x[kVector];
    load_piece(logits + v, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      x[j] = counts ? scale * __expf(x[j] - total.largest) - (v + j == target ? share : 0) : 0;
    }
    store_piece(logits + v, x);
  }
}

}  // namespace

template <class T>
void cross_entropy(const CrossEntropy<T>& p, cudaStream_t stream) {
  constexpr const char* kOperation = "cross_entropy";
  if (p.logits.size() == 0) return;
  const unsigned blocks = grid_of(kOperation, p.logits.extent[0]);
  if (has_aligned_rows(p.logits)) {
    cross_entropy_kernel<kPieceElements<T>><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    cross_entropy_kernel<1><<<blocks, kThreads, 0, stream>>>(p);
  }
  check_launch(kOperation);
}

template void cross_entropy(const CrossEntropy<float>&, cudaStream_t);
template void cross_entropy(const CrossEntropy<bfloat16>&, cudaStream_t);

}  // namespace efla::gpu
