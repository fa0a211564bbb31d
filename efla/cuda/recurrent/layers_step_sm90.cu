// A list of products and mixer steps in one kernel.
//
// One thread block per multiprocessor computes its part of every operator. What an operator writes for a later one goes
// through places of global memory that hold nothing at first (exchange.cuh): a thread block waits for the numbers that
// the block reads, and never for other blocks. While an operator is computed, the weights or states of the next one are
// on their way to the other half of shared memory: weights row by row as bulk copies, states each thread's pieces to
// the thread's own place.
#include <algorithm>
#include <cstring>
#include <functional>
#include <type_traits>

#include "efla/base/error.h"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/exchange.cuh"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/common/prefetch.cuh"
#include "efla/cuda/common/wgmma.cuh"
#include "efla/cuda/layers/linear_few.cuh"
#include "efla/cuda/recurrent/layers_step.h"
#include "efla/cuda/recurrent/mixer_step.cuh"

namespace efla::gpu {
namespace {

// 16-byte pieces per thread in half of the shared memory for weights and states.
template <int kRows>
constexpr int kHalfPieces = kRows == 1 ? 24 : 16;
constexpr int kMostTiles = 8;   // of an operator per thread block
constexpr int kSpanBytes = 64;  // of a row of a weight that a warp reads at once
constexpr int kGap = 64;        // bytes before every other row of a weight, so that rows differ in their banks
template <int kRows>
constexpr int kHalfBytes = kHalfPieces<kRows>* kThreads * 16 + kMostTiles* kTileRows / 2 * kGap;
constexpr int kOps = 4;  // operators in shared memory: this one, the next one, and two that are on their way

// What the threads of a block share beside the pieces, x and the sums.
struct Block {
  StepOp ops[kOps];
  float squares[kWarps][kMostFloatRows];  // of x
  MixerScratch mixer;
  std::uint64_t arrived[2];  // barriers of the weights in each half
};

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

// The tiles of a product that this block computes.
struct OwnTiles {
  int first, count, step, per_tile;

  __device__ explicit OwnTiles(const StepOp& op)
      : first(op.first_tile + static_cast<int>(blockIdx.x)),
        step(static_cast<int>(gridDim.x)),
        per_tile(op.linear.swiglu ? kTileRows / 2 : kTileRows) {
    count = first < op.end_tile ? (op.end_tile - first + step - 1) / step : 0;
  }
};

// Returns where row `row` of a block's tiles of a weight lies in half of the shared memory.
__device__ __forceinline__ int row_at(int row, int spans) {
  return row * spans * kWarps * kSpanBytes + (row + 1) / 2 * kGap;
}

// Starts the copies of a block's rows of a product's weight. Columns beyond the weight's become zeros, rows beyond it
// stay as they are.
template <class W>
__device__ __forceinline__ void fetch_weight(const StepOp& op, unsigned char* half, std::uint64_t* arrived) {
  const LinearForward& p = op.linear;
  const auto& weight = weight_of<W>(p);
  const OwnTiles tiles(op);
  if (tiles.count == 0) return;
  const int outputs = static_cast<int>(p.y.extent[1]), rows = tiles.count * kTileRows;
  const int bytes = static_cast<int>(weight.extent[1] * sizeof(W)), padded = op.spans * kWarps * kSpanBytes;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 32) {
    const auto output_of = [&](int row) {
      return (tiles.first + row / kTileRows * tiles.step) * tiles.per_tile + (row & (tiles.per_tile - 1));
    };
    int own = 0;
    for (int row = thread; row < rows; row += 32) own += output_of(row) < outputs;
    barrier_expect(arrived, own * bytes);
    for (int row = thread; row < rows; row += 32) {
      const int output = output_of(row);
      if (output >= outputs) continue;
      const int from = output + (row % kTileRows < tiles.per_tile ? 0 : outputs);
      load_bulk(half + row_at(row, op.spans), weight.data + from * weight.stride[0], bytes, arrived);
    }
  }
  for (int i = thread, pieces = (padded - bytes) / 16; i < rows * pieces; i += kThreads) {
    *reinterpret_cast<uint4*>(half + row_at(i / pieces, op.spans) + bytes + i % pieces * 16) = {0, 0, 0, 0};
  }
}

// Starts the copies of a block's weights or states of an operator. Copies of states are not committed.
template <class W>
__device__ __forceinline__ void fetch(const StepOp& op, unsigned char* half, std::uint64_t* arrived) {
  if (op.kind == StepOp::Kind::linear) return fetch_weight<W>(op, half, arrived);
  const MixerStep& p = op.mixer;
  const int heads = static_cast<int>(p.shape.heads), i_b = static_cast<int>(blockIdx.x) / heads;
  if (i_b >= p.shape.batch) return;
  const int h = static_cast<int>(blockIdx.x) % heads;
  fetch_state(p, i_b, h, reinterpret_cast<uint4*>(half) + threadIdx.x);
  prefetch_channels(p, i_b, h, h);
}

template <class W, int kRows>
__device__ __forceinline__ void compute_linear(const StepOp& op, const unsigned char* half, std::uint64_t* arrived,
                                               unsigned parity, float* slices, float* sums, Block& block) {
  const LinearForward& p = op.linear;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = static_cast<int>(p.x.extent[0]), outputs = static_cast<int>(p.y.extent[1]);
  const OwnTiles tiles(op);
  FewPlan plan;
  plan.spans = op.spans;
  plan.slice = op.spans * kSpan<W> + 16;
  slices += warp * kRows * plan.slice;
  stage_x<W, kRows>(p, plan, warp * op.spans * kSpan<W>, slices, block.squares[warp], lane, op.awaited);
  const int per_tile = tiles.per_tile, shift = p.swiglu ? 2 : 3;
  const int i = static_cast<int>(threadIdx.x), in_tile = i & (per_tile - 1), m = (i >> shift) % kRows;
  const int d = (i >> shift) / kRows, n = (tiles.first + d * tiles.step) * per_tile + in_tile;
  const bool writes = d < tiles.count && m < rows && n < outputs;
  float residual[1] = {};
  if (writes && p.residual) read_places({p.residual.at(m, n)}, residual, op.residual_awaited);
  copy_async_wait<1>();
  if (tiles.count > 0) barrier_wait(arrived, parity);
  for (int tile = 0; tile < tiles.count; ++tile) {
    TileSums<W, kRows> tile_sums;
    const unsigned char* const pieces =
        half + row_at(tile * kTileRows + lane / 4, op.spans) + warp * op.spans * kSpanBytes + lane % 4 * 16;
#pragma unroll 4
    for (int s = 0; s < op.spans; ++s) {
      tile_sums.add(*reinterpret_cast<const uint4*>(pieces + s * kSpanBytes), slices + s * kSpan<W>, plan.slice, lane);
    }
    tile_sums.store(sums + (tile * kWarps + warp) * kRows * kTileRows, lane);
  }
  __syncthreads();
  if (!writes) return;
  const float* const of_tile = sums + d * kWarps * kRows * kTileRows;
  const float y = tile_output<kRows>(p, of_tile, block.squares, m, in_tile, per_tile) + residual[0];
  *p.y.at(m, n) = y;
  if (op.exchange != nullptr) write_place(op.exchange + m * p.y.stride[0] + n, y);
}

template <class W, int kRows>
__global__ void __launch_bounds__(kThreads, 1) layers_step_kernel(const StepOp* ops, int count) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ __align__(16) Block block;
  constexpr int kSums = kMostTiles * kWarps * kRows * kTileRows, kHalf = kHalfBytes<kRows>;
  float* const all_sums = reinterpret_cast<float*>(shared + 2 * kHalf);
  float* const slices = all_sums + 2 * kSums;
  fetch_op(ops, 0, count, block);
  fetch_op(ops, 1, count, block);
  fetch_op(ops, 2, count, block);
  copy_async_commit();
  if (threadIdx.x < 2) barrier_init(&block.arrived[threadIdx.x], 32);
  fence_for_products();
  copy_async_wait<0>();
  __syncthreads();
  unsigned parities = 0;  // of the phases of both barriers
  fetch<W>(block.ops[0], shared, &block.arrived[0]);
  copy_async_commit();
  __syncthreads();
  for (int i = 0; i < count; ++i) {
    const StepOp& op = block.ops[i % kOps];
    if (i + 1 < count) fetch<W>(block.ops[(i + 1) % kOps], shared + (i + 1) % 2 * kHalf, &block.arrived[(i + 1) % 2]);
    fetch_op(ops, i + 3, count, block);
    copy_async_commit();
    const unsigned char* const half = shared + i % 2 * kHalf;
    if (op.kind == StepOp::Kind::linear) {
      compute_linear<W, kRows>(op, half, &block.arrived[i % 2], parities >> i % 2 & 1, slices, all_sums + i % 2 * kSums,
                               block);
      if (OwnTiles(op).count > 0) parities ^= 1U << i % 2;
    } else {
      const MixerStep& p = op.mixer;
      const int heads = static_cast<int>(p.shape.heads), i_b = static_cast<int>(blockIdx.x) / heads;
      if (i_b < p.shape.batch) {
        const int h = static_cast<int>(blockIdx.x) % heads;
        compute_head<1, kFewTaps, true>(p, i_b, i_b, h, h, true, static_cast<float>(p.rule.scale),
                                        reinterpret_cast<const uint4*>(half) + threadIdx.x, block.mixer, op.exchange,
                                        op.awaited);
      } else {
        copy_async_wait<1>();
      }
    }
    fence_for_products();  // bulk copies take the place of what threads wrote
    __syncthreads();       // also for operators that have come to shared memory
  }
}

template <class W>
int spans_of(const LinearForward& p) {
  return static_cast<int>((p.x.extent[1] + kWarps * kSpan<W> - 1) / (kWarps * kSpan<W>));
}
int spans_of(const LinearForward& p) { return p.weight ? spans_of<float>(p) : spans_of<bfloat16>(p); }

int slice_columns_of(const LinearForward& p) { return spans_of(p) * (p.weight ? kSpan<float> : kSpan<bfloat16>); }

// Returns the floats from the first to the last element of a view.
std::int64_t floats_of(const View<float, 2>& y) { return (y.extent[0] - 1) * y.stride[0] + y.extent[1]; }

// Returns the places that it has in the exchange, whole pieces of 16 bytes.
std::int64_t places_of(const View<float, 2>& y) { return (floats_of(y) + 3) / 4 * 4; }

int half_pieces(int rows) { return rows == 1 ? kHalfPieces<1> : kHalfPieces<4>; }

// Returns the bytes of dynamic shared memory of a kernel whose products have slices of `slice_columns` columns.
int shared_bytes(int rows, int slice_columns) {
  return 2 * (rows == 1 ? kHalfBytes<1> : kHalfBytes<4>)+2 * kMostTiles * kWarps * rows * kTileRows * 4 +
         kWarps * rows * (slice_columns + 16) * 4;
}

template <class W, int kRows>
void launch(const StepOp* ops, int count, int slice_columns, cudaStream_t stream) {
  const auto kernel = layers_step_kernel<W, kRows>;
  const int bytes = shared_bytes(kRows, slice_columns);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  const int blocks = multiprocessors();
  void* arguments[] = {&ops, &count};
  check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                                    dim3(kThreads), arguments, static_cast<std::size_t>(bytes), stream),
        "layers_step");
}

}  // namespace

bool LayersStep::takes(const LinearForward& p) {
  const int rows = static_cast<int>(p.x.extent[0]);
  if (rows > kMostFloatRows || spans_of(p) > half_pieces(rows)) return false;
  const int bytes = shared_bytes(rows == 1 ? 1 : kMostFloatRows, slice_columns_of(p));
  return has_shared_memory(static_cast<std::size_t>(bytes) + sizeof(Block));
}

bool LayersStep::takes(const MixerStep& p) {
  return p.shape.key_dim <= kStateKeys && p.shape.value_dim <= kStateColumns && p.shape.group() == 1 && !p.slots &&
         p.taps.extent[1] <= kFewTaps && p.shape.batch * p.shape.heads <= multiprocessors();
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
    ops_.push_back(op);
  }
  exchange_floats_ += places_of(p.y);
}

void LayersStep::add(const MixerStep& p) {
  StepOp op;
  op.kind = StepOp::Kind::mixer;
  op.mixer = p;
  op.mixer.rule.scale = p.rule.scale_for(p.shape.key_dim);
  ops_.push_back(op);
  exchange_floats_ += places_of(p.o);
}

std::size_t LayersStep::bytes() const {
  return ops_.size() * sizeof(StepOp) + static_cast<std::size_t>(exchange_floats_) * sizeof(float);
}

std::vector<std::byte> LayersStep::image(void* device) const {
  std::vector<StepOp> ops = ops_;
  float* exchange = reinterpret_cast<float*>(static_cast<std::byte*>(device) + ops.size() * sizeof(StepOp));
  struct Output {
    View<float, 2> view;
    float* exchange;
  };
  std::vector<Output> outputs;
  // Lets a view of what an operator before wrote show the exchange. Returns whether it does.
  const auto redirect = [&](View<const float, 2>& view) {
    for (auto output = outputs.rbegin(); output != outputs.rend(); ++output) {
      const float* const begin = output->view.data;
      if (std::less<>()(view.data, begin) || !std::less<>()(view.data, begin + floats_of(output->view))) continue;
      view.data = output->exchange + (view.data - begin);
      return true;
    }
    return false;
  };
  for (std::size_t i = 0; i < ops.size(); ++i) {
    StepOp& op = ops[i];
    op.exchange = exchange;
    View<float, 2> y = op.linear.y;
    if (op.kind == StepOp::Kind::linear) {
      op.awaited = redirect(op.linear.x);
      op.residual_awaited = op.linear.residual && redirect(op.linear.residual);
      const bool more = i + 1 < ops.size() && ops[i + 1].first_tile > 0;  // parts of the same product
      if (more) continue;
    } else {
      MixerStep& p = op.mixer;
      y = p.o;
      int given = 0, awaited = 0;
      for (View<const float, 2>* view : {&p.qkv, &p.beta, &p.decay, &p.gate}) {
        if (!*view) continue;
        ++given;
        awaited += redirect(*view);
      }
      if (awaited != 0 && awaited != given) {
        throw Error("layers_step", "projections", "some that are written before", "all of a mixer or none");
      }
      op.awaited = awaited > 0;
    }
    outputs.push_back({y, exchange});
    exchange += places_of(y);
  }
  std::vector<std::byte> bytes(this->bytes());
  std::memcpy(bytes.data(), ops.data(), ops.size() * sizeof(StepOp));
  return bytes;
}

void LayersStep::run(void* device, cudaStream_t stream) const {
  const auto* ops = static_cast<const StepOp*>(device);
  const int count = static_cast<int>(ops_.size());
  static_assert(kNothing == 0xffffffffU);
  check(cudaMemsetAsync(static_cast<std::byte*>(device) + ops_.size() * sizeof(StepOp), 0xff,
                        static_cast<std::size_t>(exchange_floats_) * sizeof(float), stream),
        "cudaMemsetAsync");
  const auto go = [&](auto kernel_launch) { kernel_launch(ops, count, slice_columns_, stream); };
  if (narrow_) {
    rows_ == 1 ? go(launch<bfloat16, 1>) : go(launch<bfloat16, 4>);
  } else {
    rows_ == 1 ? go(launch<float, 1>) : go(launch<float, 4>);
  }
}

}  // namespace efla::gpu
