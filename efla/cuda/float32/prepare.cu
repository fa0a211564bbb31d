// `prepare`: computes the record of every chunk and value head (Float32Record), that is everything of the chunk
// algorithm that does not depend on the state. One thread block per chunk and value head.
#include "efla/cuda/float32/prepare.cuh"

namespace efla::gpu {
namespace {

constexpr int kThreads = kPrepareThreads;

template <int KD>
struct Memory {
  alignas(128) float k[kFloat32Tokens * KD], q[kFloat32Tokens * KD];  // after the L2 norm
  Float32Record record;
  Float32Vectors vectors;
};

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
  normalise_rows<KD>(m.k, p.rule.qk_l2norm, thread, m.vectors.key_factor, m.vectors.lambda);
  normalise_rows<KD>(m.q, p.rule.qk_l2norm, thread, m.vectors.query_factor, nullptr);
  __syncthreads();
  if (warp == 0) token_vectors<false>(c, at, i_h, lane, m.record, m.vectors);
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
  if (warp == 0) invert_blocks(lane, m.record);
  __syncthreads();
  const std::int64_t index = slot * p.shape.value_heads + i_h;
  store_record(c, index, m.record, m.vectors, static_cast<Float32Record*>(c.records)[index], thread);
}

template <int KD>
void launch(const Float32Problem& c, cudaStream_t stream) {
  launch_prepare_kernel("chunk_float32, prepare", prepare_kernel<KD>, sizeof(Memory<KD>), c, stream);
}

}  // namespace

void launch_float32_prepare(const Float32Problem& c, cudaStream_t stream) {
  float32_keys(c.p.shape) == 64 ? launch<64>(c, stream) : launch<128>(c, stream);
}

}  // namespace efla::gpu
