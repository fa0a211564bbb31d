// Everything of a chunk that does not depend on the state, for all chunks at once: one thread block per chunk and value
// head.
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/float32/products.cuh"

namespace efla::gpu {
namespace {

constexpr int kThreads = 128;

// Decays below e^kMinDecay are zero in float32 whatever their exponent.
constexpr double kMinDecay = -120;

template <int KD>
struct Memory {
  alignas(128) float k[kFloat32Tokens * KD], q[kFloat32Tokens * KD];  // after the L2 norm
  Float32Record record;
  Float32Vectors vectors;
};

// Sums the squares of the rows of a tile, with four threads per row, and applies the L2 norm. Writes the norm's factors
// and what λ is then.
template <int KD>
__device__ __forceinline__ void finish_rows(float* tile, bool l2norm, int thread, float* factors, float* lambdas) {
  const int row = thread / 4;
  float4* const own = reinterpret_cast<float4*>(tile + row * KD) + thread % 4;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < KD / 16; ++i) {
    const float4 x = own[4 * i];
    sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
  }
  sum += __shfl_xor_sync(0xffffffffU, sum, 1);
  sum += __shfl_xor_sync(0xffffffffU, sum, 2);
  float factor = 1;
  if (l2norm) {
    factor = 1 / sqrtf(sum + static_cast<float>(kL2NormEpsilon));
#pragma unroll
    for (int i = 0; i < KD / 16; ++i) {
      const float4 x = own[4 * i];
      own[4 * i] = float4{x.x * factor, x.y * factor, x.z * factor, x.w * factor};
    }
  }
  if (thread % 4 == 0) {
    factors[row] = factor;
    if (lambdas) lambdas[row] = sum * factor * factor;
  }
}

// The log of the decay from the chunk's start to the lane's token. In float64, because what is used of it are the
// exponentials of differences.
__device__ __forceinline__ double scan_decays(double g, int lane) {
  if (g < kMinDecay) g = kMinDecay;  // NaN stays
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double before = __shfl_up_sync(0xffffffffU, g, offset);
    if (lane >= offset) g += before;
  }
  return g;
}

// Computes the gains and decays of the lane's token.
template <int KD>
__device__ __forceinline__ void token_vectors(const Float32Problem& c, const ChunkAt& at, std::int64_t i_h, int lane,
                                              Memory<KD>& m) {
  const DeltaForward<float>& p = c.p;
  const bool exists = lane < at.rows;
  const float beta = exists ? to_float(p.beta(at.i_b, at.start + lane, i_h)) : 0.0F;
  const double g = p.rule.decay == Decay::scalar && exists ? p.g(at.i_b, at.start + lane, i_h, 0) : 0.0;
  const double prefix = scan_decays(g, lane), total = __shfl_sync(0xffffffffU, prefix, 31);
  const float alpha = gain_alpha(p.rule.step, beta, m.vectors.lambda[lane]);
  const float a = static_cast<float>(p.rule.step.erase_scale) * alpha,
              b = static_cast<float>(p.rule.step.write_scale) * alpha, gamma = expf(static_cast<float>(prefix));
  m.vectors.prefix[lane] = prefix;
  m.vectors.a[lane] = a;
  m.vectors.b[lane] = b;
  m.record.b[lane] = b;
  m.record.read[lane] = a * gamma * m.vectors.key_factor[lane];
  m.record.write[lane] = m.vectors.key_factor[lane] * expf(static_cast<float>(total - prefix));
  m.record.out[lane] = c.scale * gamma * m.vectors.query_factor[lane];
  if (lane == 31) m.record.decay = gamma;
}

// Writes 16 rows of −A or of P to the record, from the products of keys or queries with keys.
template <int KD>
__device__ __forceinline__ void write_products(const float (&x)[kFloat32Tokens / 2], bool queries, bool gated,
                                               float scale, int first, int lane, Memory<KD>& m) {
#pragma unroll
  for (int i = 0; i < kFloat32Tokens / 2; ++i) {
    const int row = first + lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    float factor = queries ? scale : -m.vectors.a[row];
    if (gated) factor *= expf(static_cast<float>(m.vectors.prefix[row] - m.vectors.prefix[column]));
    const bool below = column < row || (queries && column == row);
    (queries ? m.record.p : m.record.solve)[tile_index<kFloat32Tokens>(row, column)] = below ? factor * x[i] : 0.0F;
  }
}

// Inverts the blocks of I + A on the diagonal by forward substitution, one column per lane.
template <int KD>
__device__ __forceinline__ void invert_blocks(int lane, Memory<KD>& m) {
  const int first = lane / 8 * 8, column = lane % 8;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] += m.record.solve[tile_index<kFloat32Tokens>(first + i, first + j)] * x[j];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) m.record.solve[tile_index<kFloat32Tokens>(first + i, first + column)] = x[i];
}

template <int KD>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Float32Problem c) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& m = *reinterpret_cast<Memory<KD>*>(shared);
  const DeltaForward<float>& p = c.p;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const std::int64_t slot = blockIdx.x / p.shape.value_heads, i_h = blockIdx.x % p.shape.value_heads,
                     i_q = i_h / p.shape.group();
  const ChunkAt at = chunk_at(c, slot);
  if (at.rows == 0) return;
  load_tile<KD, kThreads>(m.k, p.k, at.i_b, at.start, at.rows, i_q, 0, c.k_rows, thread);
  load_tile<KD, kThreads>(m.q, p.q, at.i_b, at.start, at.rows, i_q, 0, c.q_rows, thread);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  finish_rows<KD>(m.k, p.rule.qk_l2norm, thread, m.vectors.key_factor, m.vectors.lambda);
  finish_rows<KD>(m.q, p.rule.qk_l2norm, thread, m.vectors.query_factor, nullptr);
  __syncthreads();
  if (warp == 0) token_vectors(c, at, i_h, lane, m);
  const bool queries = warp >= 2;
  const int first = 16 * (warp % 2);
  float x[kFloat32Tokens / 2] = {};
#pragma unroll 4
  for (int step = 0; step < KD / 8; ++step) {
    const auto rows = row_operand<KD>(shared_address(queries ? m.q : m.k), first, 8 * step, lane);
#pragma unroll
    for (int tile = 0; tile < kFloat32Tokens / 8; ++tile) {
      if (8 * tile < first + 16) multiply_rows<KD>(x + 4 * tile, rows, shared_address(m.k), 8 * tile, 8 * step, lane);
    }
  }
  __syncthreads();
  write_products(x, queries, p.rule.decay == Decay::scalar, c.scale, first, lane, m);
  __syncthreads();
  if (warp == 0) invert_blocks(lane, m);
  __syncthreads();
  const std::int64_t index = slot * p.shape.value_heads + i_h;
  const auto store = [&](void* to, const void* from, int bytes) {
    for (int i = thread; i < bytes / 16; i += kThreads) {
      static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
    }
  };
  store(&c.records[index], &m.record, sizeof(Float32Record));
  if (c.vectors) store(&c.vectors[index], &m.vectors, sizeof(Float32Vectors));
}

template <int KD>
void launch(const Float32Problem& c, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Memory<KD>);
  const auto kernel = prepare_kernel<KD>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  kernel<<<grid_of("chunk_float32", c.slots * c.p.shape.value_heads), kThreads, kBytes, stream>>>(c);
  check_launch("chunk_float32, prepare");
}

}  // namespace

void launch_float32_prepare(const Float32Problem& c, cudaStream_t stream) {
  float32_keys(c.p.shape) == 64 ? launch<64>(c, stream) : launch<128>(c, stream);
}

}  // namespace efla::gpu
