// A list of products and mixer's steps in one kernel.
//
// One thread block per multiprocessor computes its part of every operator; a barrier of all thread blocks stands
// between two operators of which the second reads what the first writes. While an operator is computed, the weights or
// states of the next one are on their way to the other half of shared memory, each thread's pieces to the thread's own
// place.
#include <algorithm>
#include <string>
#include <type_traits>

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/prefetch.cuh"
#include "efla/cuda/layers/linear_few.cuh"
#include "efla/cuda/recurrent/layers_step.h"
#include "efla/cuda/recurrent/mixer_step.cuh"

namespace efla::gpu {
namespace {

// 16-byte pieces per thread in half of the shared memory for weights and states.
template <int kRows>
constexpr int kHalfPieces = kRows == 1 ? 24 : 16;
constexpr int kMostTiles = 8;  // of an operator per thread block
constexpr int kOps = 4;        // operators in shared memory: this one, the next one, and two that are on their way

// What the threads of a block share beside the pieces, x and the sums.
struct Block {
  StepOp ops[kOps];
  float squares[kWarps][kMostFloatRows];  // of x
  MixerScratch mixer;
};

__device__ __forceinline__ unsigned read_acquire(const unsigned* from) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(from)) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(unsigned* to, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(x) : "memory");
}

// Copies an operator to shared memory; not committed.
__device__ __forceinline__ void fetch_op(const StepOp* ops, int i, int count, Block& block) {
  constexpr int kPieces = sizeof(StepOp) / 16;
  static_assert(sizeof(StepOp) % 16 == 0);
  if (i >= count) return;
  for (int piece = static_cast<int>(threadIdx.x); piece < kPieces; piece += kThreads) {
    copy_async_16(shared_address(reinterpret_cast<uint4*>(&block.ops[i % kOps]) + piece),
                  reinterpret_cast<const uint4*>(ops + i) + piece, 16);
  }
}

template <class W>
__device__ __forceinline__ const View<const W, 2>& weight_of(const LinearForward& p) {
  if constexpr (std::is_same_v<W, float>) {
    return p.weight;
  } else {
    return p.narrow_weight;
  }
}

// Starts the copies of a block's pieces of an operator's weights or states; not committed.
template <class W>
__device__ __forceinline__ void fetch_pieces(const StepOp& op, uint4* own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = static_cast<int>(gridDim.x);
  if (op.kind == StepOp::Kind::linear) {
    const LinearForward& p = op.linear;
    const auto& weight = weight_of<W>(p);
    const int outputs = static_cast<int>(p.y.extent[1]), per_tile = p.swiglu ? kTileRows / 2 : kTileRows;
    const int column = (warp * op.spans * 4 + lane % 4) * kPiece<W>;
    const int columns = static_cast<int>(weight.extent[1]) - column;
    const int x_column = warp * op.spans * kSpan<W> + 4 * lane;
    if (p.norm_weight && 4 * lane < op.spans * kSpan<W> && x_column < weight.extent[1]) {
      prefetch(p.norm_weight.data + x_column);
    }
    uint4* to = own;
    for (int tile = op.first_tile + static_cast<int>(blockIdx.x); tile < op.end_tile; tile += step) {
      const int output = tile * per_tile + (lane / 4 & (per_tile - 1));
      const int row = output + (p.swiglu && lane >= 16 ? outputs : 0);
      const W* const from = weight.data + row * weight.stride[0] + column;
      for (int s = 0; s < op.spans; ++s, to += kThreads) {
        const bool exists = output < outputs && s * kSpan<W> < columns;
        copy_async_16(shared_address(to), exists ? from + s * kSpan<W> : weight.data, exists ? 16 : 0);
      }
    }
    return;
  }
  const MixerStep& p = op.mixer;
  const int heads = static_cast<int>(p.shape.heads), i_b = static_cast<int>(blockIdx.x) / heads;
  if (i_b >= p.shape.batch) return;
  const int h = static_cast<int>(blockIdx.x) % heads;
  fetch_state(p, i_b, h, own);
  prefetch_channels(p, i_b, h, h);
}

template <class W, int kRows>
__device__ __forceinline__ void compute_linear(const StepOp& op, const uint4* own, float* slices, float* sums,
                                               Block& block) {
  const LinearForward& p = op.linear;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = static_cast<int>(gridDim.x);
  const int rows = static_cast<int>(p.x.extent[0]), outputs = static_cast<int>(p.y.extent[1]);
  const int first = op.first_tile + static_cast<int>(blockIdx.x);
  const int tiles = first < op.end_tile ? (op.end_tile - first + step - 1) / step : 0;
  FewPlan plan;
  plan.spans = op.spans;
  plan.slice = op.spans * kSpan<W> + 16;
  slices += warp * kRows * plan.slice;
  stage_x<W, kRows>(p, plan, warp * op.spans * kSpan<W>, slices, block.squares[warp], lane);
  const int per_tile = p.swiglu ? kTileRows / 2 : kTileRows, shift = p.swiglu ? 2 : 3;
  const int i = static_cast<int>(threadIdx.x), in_tile = i & (per_tile - 1), m = (i >> shift) % kRows;
  const int d = (i >> shift) / kRows, n = (first + d * step) * per_tile + in_tile;
  const bool writes = d < tiles && m < rows && n < outputs;
  const float residual = writes && p.residual ? __ldcg(p.residual.at(m, n)) : 0.0F;
  copy_async_wait<1>();
  for (int tile = 0; tile < tiles; ++tile) {
    TileSums<W, kRows> tile_sums;
#pragma unroll 4
    for (int s = 0; s < op.spans; ++s) {
      tile_sums.add(own[(tile * op.spans + s) * kThreads], slices + s * kSpan<W>, plan.slice, lane);
    }
    tile_sums.store(sums + (tile * kWarps + warp) * kRows * kTileRows, lane);
  }
  __syncthreads();
  if (!writes) return;
  const auto sum_at = [&](int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[((d * kWarps + w) * kRows + m) * kTileRows + row];
    return sum;
  };
  float r = 1;
  if (p.norm_weight) {
    float all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += block.squares[w][m];
    r = rsqrtf(__fdividef(all, static_cast<float>(p.x.extent[1])) + p.norm_eps);
  }
  float value = r * sum_at(in_tile);
  if (p.swiglu) value *= __fdividef(1.0F, 1.0F + expf(-value)) * (r * sum_at(per_tile + in_tile));
  *p.y.at(m, n) = value + residual;
}

template <class W, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    layers_step_kernel(const StepOp* ops, int count, int barriers, unsigned* barrier) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ __align__(16) Block block;
  uint4* const own = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  constexpr int kSums = kMostTiles * kWarps * kRows * kTileRows, kHalf = kHalfPieces<kRows> * kThreads;
  float* const all_sums = reinterpret_cast<float*>(shared + 2 * kHalf * 16);
  float* const slices = all_sums + 2 * kSums;
  // barrier[0] counts arrivals of all launches, barrier[1] is that count before this launch.
  unsigned target = read_acquire(barrier + 1);
  fetch_op(ops, 0, count, block);
  fetch_op(ops, 1, count, block);
  fetch_op(ops, 2, count, block);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  fetch_pieces<W>(block.ops[0], own);
  copy_async_commit();
  for (int i = 0; i < count; ++i) {
    const StepOp& op = block.ops[i % kOps];
    if (i + 1 < count) fetch_pieces<W>(block.ops[(i + 1) % kOps], own + (i + 1) % 2 * kHalf);
    fetch_op(ops, i + 3, count, block);
    copy_async_commit();
    if (op.after_barrier) {
      if (threadIdx.x == 0) {
        while (static_cast<int>(read_acquire(barrier) - target) < 0) {
        }
      }
      __syncthreads();
    }
    const uint4* const pieces = own + i % 2 * kHalf;
    if (op.kind == StepOp::Kind::linear) {
      compute_linear<W, kRows>(op, pieces, slices, all_sums + i % 2 * kSums, block);
    } else {
      const MixerStep& p = op.mixer;
      const int heads = static_cast<int>(p.shape.heads), i_b = static_cast<int>(blockIdx.x) / heads;
      if (i_b < p.shape.batch) {
        const int h = static_cast<int>(blockIdx.x) % heads;
        compute_head<1>(p, i_b, i_b, h, h, true, static_cast<float>(p.rule.scale), pieces, block.mixer);
      } else {
        copy_async_wait<1>();
      }
    }
    __syncthreads();  // also for operators that have come to shared memory
    if (i + 1 < count && block.ops[(i + 1) % kOps].after_barrier) {
      target += gridDim.x;
      if (threadIdx.x == 0) add_release(barrier, 1);
    }
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) barrier[1] += static_cast<unsigned>(barriers) * gridDim.x;
}

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

template <class W>
int spans_of(const LinearForward& p) {
  return static_cast<int>((p.x.extent[1] + kWarps * kSpan<W> - 1) / (kWarps * kSpan<W>));
}
int spans_of(const LinearForward& p) { return p.weight ? spans_of<float>(p) : spans_of<bfloat16>(p); }

int slice_columns_of(const LinearForward& p) { return spans_of(p) * (p.weight ? kSpan<float> : kSpan<bfloat16>); }

int half_pieces(int rows) { return rows == 1 ? kHalfPieces<1> : kHalfPieces<4>; }

// Returns the dynamic shared memory of a kernel whose products have slices of so many columns.
int shared_bytes(int rows, int slice_columns) {
  return 2 * half_pieces(rows) * kThreads * 16 + 2 * kMostTiles * kWarps * rows * kTileRows * 4 +
         kWarps * rows * (slice_columns + 16) * 4;
}

template <class W, int kRows>
void launch(const StepOp* ops, int count, int barriers, int slice_columns, unsigned* counters, cudaStream_t stream) {
  const auto kernel = layers_step_kernel<W, kRows>;
  const int bytes = shared_bytes(kRows, slice_columns);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  const int blocks = multiprocessors();
  void* arguments[] = {&ops, &count, &barriers, &counters};
  check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                                    dim3(kThreads), arguments, static_cast<std::size_t>(bytes), stream),
        "layers_step");
}

}  // namespace

std::string LayersStep::refusal(const LinearForward& p) {
  const int rows = static_cast<int>(p.x.extent[0]);
  if (rows > kMostFloatRows) return "too many rows";
  const auto bytes = static_cast<std::size_t>(shared_bytes(rows == 1 ? 1 : kMostFloatRows, slice_columns_of(p)));
  const bool fits = spans_of(p) <= half_pieces(rows) && has_shared_memory(bytes + sizeof(Block));
  return fits ? "" : "too many columns";
}

std::string LayersStep::refusal(const MixerStep& p) {
  if (p.shape.key_dim > kStateKeys || p.shape.value_dim > kStateColumns) return "heads";
  if (p.shape.group() != 1 || p.slots) return "groups or slots";
  return p.shape.batch * p.shape.heads <= multiprocessors() ? "" : "too many heads";
}

void LayersStep::add(const LinearForward& p) {
  rows_ = static_cast<int>(p.x.extent[0]);
  narrow_ = !p.weight;
  StepOp op;
  op.linear = p;
  op.spans = spans_of(p);
  slice_columns_ = std::max(slice_columns_, slice_columns_of(p));
  const int per_tile = p.swiglu ? kTileRows / 2 : kTileRows;
  const int tiles = static_cast<int>((p.y.extent[1] + per_tile - 1) / per_tile);
  const int most = std::min(kMostTiles, half_pieces(rows_) / op.spans) * multiprocessors();
  for (op.first_tile = 0; op.first_tile < tiles; op.first_tile = op.end_tile) {
    op.end_tile = std::min(tiles, op.first_tile + most);
    op.after_barrier = op.first_tile == 0 && !ops_.empty();
    ops_.push_back(op);
  }
}

void LayersStep::add(const MixerStep& p) {
  StepOp op;
  op.kind = StepOp::Kind::mixer;
  op.after_barrier = !ops_.empty();
  op.mixer = p;
  op.mixer.rule.scale = p.rule.scale_for(p.shape.key_dim);
  ops_.push_back(op);
}

void LayersStep::run(const StepOp* ops, unsigned* counters, cudaStream_t stream) const {
  int barriers = 0;
  for (const auto& op : ops_) barriers += op.after_barrier;
  const int count = static_cast<int>(ops_.size());
  const auto go = [&](auto kernel_launch) { kernel_launch(ops, count, barriers, slice_columns_, counters, stream); };
  if (narrow_) {
    rows_ == 1 ? go(launch<bfloat16, 1>) : go(launch<bfloat16, 4>);
  } else {
    rows_ == 1 ? go(launch<float, 1>) : go(launch<float, 4>);
  }
}

}  // namespace efla::gpu
