// What both kernels of `prepare` share (prepare.cu, prepare_channel.cu). A thread block of kPrepareThreads threads has
// a chunk and a value head.
#pragma once

#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/float32/products.cuh"

namespace efla::gpu {

inline constexpr int kPrepareThreads = 128;

// Sums the squares of the rows of a tile, with four threads per row, and applies the L2 norm if l2norm is set. Writes
// the factors of the norm and, if lambdas is not null, λ after the norm.
template <int KD>
__device__ __forceinline__ void normalise_rows(float* tile, bool l2norm, int thread, float* factors, float* lambdas) {
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

// Multiplies the rows of a tile of erase keys by the factors of the L2 norm of their keys, and writes μ to the vectors.
// `keys` are the keys after the norm. A warp reads factors that it wrote in normalise_rows.
template <int KD>
__device__ __forceinline__ void normalise_erase_keys(float* tile, const float* keys, int thread,
                                                     Float32Vectors& vectors) {
  const int row = thread / 4;
  float4* const own = reinterpret_cast<float4*>(tile + row * KD) + thread % 4;
  const float4* const key = reinterpret_cast<const float4*>(keys + row * KD) + thread % 4;
  __syncwarp();
  const float factor = vectors.key_factor[row];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < KD / 16; ++i) {
    const float4 x = own[4 * i], k = key[4 * i], scaled{x.x * factor, x.y * factor, x.z * factor, x.w * factor};
    own[4 * i] = scaled;
    sum += scaled.x * k.x + scaled.y * k.y + scaled.z * k.z + scaled.w * k.w;
  }
  sum += __shfl_xor_sync(0xffffffffU, sum, 1);
  sum += __shfl_xor_sync(0xffffffffU, sum, 2);
  if (thread % 4 == 0) vectors.lambda[row] = sum;
}

// Returns the log of the decay from the chunk's start to the lane's token. It is in float64, because exponentials of
// its differences are used.
__device__ __forceinline__ double scan_decays(double g, int lane) {
  constexpr double kMinDecay = -120;  // decays below e^kMinDecay are zero in float32 whatever their exponent
  if (g < kMinDecay) g = kMinDecay;   // NaN stays
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double before = __shfl_up_sync(0xffffffffU, g, offset);
    if (lane >= offset) g += before;
  }
  return g;
}

// Writes the gains of the lane's token and, without gates per key channel, its decays.
template <bool kChannel, bool kTwoKeys = false>
__device__ __forceinline__ void token_vectors(const Float32Problem& c, const ChunkAt& at, std::int64_t i_h, int lane,
                                              Float32Record& record, Float32Vectors& vectors) {
  const DeltaForward<float>& p = c.p;
  const bool exists = lane < at.rows;
  const float beta = exists ? to_float(p.beta(at.i_b, at.start + lane, i_h)) : 0.0F;
  const float lambda = vectors.lambda[lane];
  const float alpha = kTwoKeys ? two_key_alpha(p.rule.step, beta, lambda) : gain_alpha(p.rule.step, beta, lambda);
  const float a = static_cast<float>(p.rule.step.erase_scale) * alpha,
              b = static_cast<float>(p.rule.step.write_scale) * alpha;
  vectors.a[lane] = a;
  vectors.b[lane] = b;
  record.b[lane] = b;
  if constexpr (kChannel) {
    vectors.prefix[lane] = 0;
    record.read[lane] = a;
    record.write[lane] = 1;
    record.out[lane] = c.scale;
    if (lane == 31) record.decay = 1;
    return;
  }
  const double g = p.rule.decay == Decay::scalar && exists ? p.g(at.i_b, at.start + lane, i_h, 0) : 0.0;
  const double prefix = scan_decays(g, lane), total = __shfl_sync(0xffffffffU, prefix, 31);
  const float gamma = expf(static_cast<float>(prefix));
  vectors.prefix[lane] = prefix;
  record.read[lane] = a * gamma * vectors.key_factor[lane];
  record.write[lane] = vectors.key_factor[lane] * expf(static_cast<float>(total - prefix));
  record.out[lane] = c.scale * gamma * vectors.query_factor[lane];
  if (lane == 31) record.decay = gamma;
}

// Inverts the diagonal blocks of I + A by forward substitution, one column per lane.
__device__ __forceinline__ void invert_blocks(int lane, Float32Record& record) {
  const int first = lane / 8 * 8, column = lane % 8;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] += record.solve[tile_index<kFloat32Tokens>(first + i, first + j)] * x[j];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) record.solve[tile_index<kFloat32Tokens>(first + i, first + column)] = x[i];
}

// Copies a record to `to` and, if c.vectors is not null, the vectors to element `index` of c.vectors.
__device__ __forceinline__ void store_record(const Float32Problem& c, std::int64_t index, const Float32Record& record,
                                             const Float32Vectors& vectors, Float32Record& to, int thread) {
  const auto store = [&](void* to, const void* from, int bytes) {
    for (int i = thread; i < bytes / 16; i += kPrepareThreads) {
      static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
    }
  };
  store(&to, &record, sizeof(Float32Record));
  if (c.vectors) store(&c.vectors[index], &vectors, sizeof(Float32Vectors));
}

// Launches a kernel with a thread block per slot and value head, with `bytes` of shared memory. Throws CudaError where
// the launch fails.
inline void launch_prepare_kernel(const char* operation, void (*kernel)(Float32Problem), std::size_t bytes,
                                  const Float32Problem& c, cudaStream_t stream) {
  launch_kernel(operation, kernel, grid_of(operation, c.slots * c.p.shape.value_heads), kPrepareThreads, bytes, stream,
                c);
}

}  // namespace efla::gpu
