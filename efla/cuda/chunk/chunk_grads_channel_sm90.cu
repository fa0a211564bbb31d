// The gradients of the inputs where every key channel has a gate, on Hopper GPUs, for all chunks at once: one
// thread block per chunk and query head, which loops over the value heads of that head.
//
// In the notation of chunk_grads.cu with the factors of the L2 norm inside, and with decays Γ and γ per channel,
//
//   W_ij = scale n_q,i n_k,j dO_i·U_j  for i ≥ j,    H_ij = n_k,i n_k,j D_i·U_j  for i > j
//   n_q dq̂_i = scale n_q,i γ_i∘(dO Sᵀ)_i + Σ_{j≤i} W_ij Γ_ij∘k_j
//   E_i = n_k,i γ_i∘(D Sᵀ)_i + Σ_{j<i} H_ij Γ_ij∘k_j,    da_i = −k_i·E_i
//   n_k dk̂_j = n_k,j γ_C/γ_j∘(U dS'ᵀ)_j + Σ_{i≥j} W_ij Γ_ij∘q_i − Σ_{i>j} a_i H_ij Γ_ij∘k_i − a_j E_j
//
// and the gradient of a gate as there, with every term per channel. Tokens are in blocks of 16. What S and earlier
// blocks give to a block I is a recurrence over blocks in products: what is decayed to the start of block J, times the
// decay over J, plus (W or H)_IJ times the keys of J decayed to J's end. Another one, from the chunk's end, has what
// dS' and later blocks give. So no factor exceeds 1. Pairs of tokens of one block are added one by one, by a thread per
// block and channel that multiplies Γ by one token's decay after the other.
//
// For a gate, what spans a token is of four kinds: pairs of the block; what the block's tokens from it on take from
// before the block; what its tokens before it give to after the block; and what spans the whole block (Crossing).
#include "efla/cuda/chunk/chunk_grads_channel_sm90.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"

namespace efla::gpu {

template <int kTiles>
__device__ void ChannelGrads<kTiles>::add_pairs(const Sums& of_query, const Sums& of_erase, const Sums& of_key) {
  float* const queries = m_.scratch(warp_, 0);  // the gradients of q̂, then E
  float* const erase = m_.scratch(warp_, 1);
  float dk[kBlock], k[kBlock], decays[kBlock], spanning[kBlock];
  write_scratch(of_key, queries);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) dk[i] = queries[place(i, lane_)];
  __syncwarp();
  write_scratch(of_query, queries);
  write_scratch(of_erase, erase);
  __syncwarp();
  read(tile().k, k, element());
#pragma unroll
  for (int i = 0; i < kBlock; ++i) decays[i] = m_.decays[kBlock * block_ + i][channel_];
  float decay = 1;
#pragma unroll
  for (int i = kBlock - 1; i >= 0; --i) {
    dk[i] *= decay;
    decay *= decays[i];
  }
  float written = crossing();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    spanning[i] = written;
    written += k[i] * dk[i];
  }
  pairs(queries, erase, k, decays, dk, spanning);
  {
    float* to = at(p_.dg, i_h_);
#pragma unroll
    for (int i = 0; i < kBlock; ++i, to = next(to, p_.dg.stride[1])) {
      if (exists(i)) *to = spanning[i];
    }
  }
  float sums[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float e = erase[place(i, lane_)];
    dk[i] -= m_.a[kBlock * block_ + i] * e;
    sums[i] = k[i] * e;
  }
  put_sums(kErase, sums);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) sums[i] = k[i] * dk[i];
  put_sums(kAlongKey, sums);
  float q[kBlock];
  read(tile().q, q, element());
#pragma unroll
  for (int i = 0; i < kBlock; ++i) sums[i] = q[i] * queries[place(i, lane_)];
  put_sums(kAlongQuery, sums);
  __syncthreads();
  finish_tokens();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    dk[i] += m_.of_key[kBlock * block_ + i] * k[i];
    q[i] = queries[place(i, lane_)] + m_.of_query[kBlock * block_ + i] * q[i];
  }
  store(0, p_.dq, q);
  store(1, p_.dk, dk);
}

template <int kTiles>
__device__ void ChannelGrads<kTiles>::pairs(float* queries, float* erase, const float (&k)[kBlock],
                                            const float (&decays)[kBlock], float (&dk)[kBlock],
                                            float (&spanning)[kBlock]) {
  const int at_row_0 = element();
  float decay[kBlock], from_start = 1;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const int token = kBlock * block_ + i;
    if (token >= at_.rows) break;  // a branch per token, before which nothing for it is computed: registers are short
    const float q = read(tile().q, i, at_row_0), erasing = m_.a[token] * k[i];
    from_start *= decays[i];
    float dq = from_start * queries[place(i, lane_)], e = from_start * erase[place(i, lane_)];
    float sum = q * dq - erasing * e;  // of what spans token j + 1, from earlier tokens than it to this one
    spanning[0] += sum;
#pragma unroll
    for (int half = 0; half <= i / 8; ++half) {
      const int at = piece_offset(token, 2 * block_ + half);
      const uint4 w = *reinterpret_cast<const uint4*>(m_.w() + at), h = *reinterpret_cast<const uint4*>(m_.h() + at);
      const std::uint32_t of_w[4] = {w.x, w.y, w.z, w.w}, of_h[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
      for (int j = 8 * half; j < 8 * half + 8; ++j) {
        if (j > i) break;
        const std::uint32_t w_pair = of_w[j / 2 % 4], h_pair = of_h[j / 2 % 4];
        const float w_ij = j % 2 == 0 ? low_of<bfloat16>(w_pair) : high_of<bfloat16>(w_pair);
        const float h_ij = j % 2 == 0 ? low_of<bfloat16>(h_pair) : high_of<bfloat16>(h_pair);
        if (j == i) {
          decay[i] = 1;
          dq += w_ij * k[i];
          dk[i] += w_ij * q;
          continue;
        }
        decay[j] *= decays[i];
        const float key = decay[j] * k[j], to_key = w_ij * q - h_ij * erasing;
        dq += w_ij * key;
        e += h_ij * key;
        dk[j] += decay[j] * to_key;
        sum += key * to_key;
        spanning[j + 1] += sum;
      }
    }
    queries[place(i, lane_)] = dq;
    erase[place(i, lane_)] = e;
  }
}

template <int kTiles>
__device__ void ChannelGrads<kTiles>::finish_tokens() {
  if (thread_ < kChunkTokens) {
    const float n_k = m_.key_factor[thread_], n_q = m_.query_factor[thread_], squares = m_.squares[thread_];
    const Gain<float> of_token =
        is_euler() ? Gain<float>{beta(), 1, 1, 0, 0} : gain(p_.rule.step, beta(), squares * n_k * n_k);
    const float dalpha = static_cast<float>(p_.rule.step.write_scale) * m_.b[thread_] -
                         static_cast<float>(p_.rule.step.erase_scale) * sum_of(kErase, thread_);
    if (thread_ < at_.rows) {
      p_.dbeta(at_.i_b, at_.start + thread_, i_h_) =
          to_bfloat16(dalpha * of_token.beta_unit * of_token.beta_slope * of_token.beta_unit);
    }
    float of_key = 2 * dalpha * of_token.lambda_slope * of_token.lambda_unit * (of_token.lambda_unit * n_k) * n_k,
          of_query = 0;
    if (p_.rule.qk_l2norm) {
      of_key -= n_k * n_k * (sum_of(kAlongKey, thread_) + of_key * squares);
      of_query = -n_q * n_q * sum_of(kAlongQuery, thread_);
    }
    m_.of_key[thread_] = of_key;
    m_.of_query[thread_] = of_query;
  }
  __syncthreads();
}

namespace {

template <int kTiles>
__global__ void __launch_bounds__(ChannelShared<kTiles>::kThreads, 1)
    channel_grads_kernel(const __grid_constant__ ChunkBackward<bfloat16> c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int heads = static_cast<int>(c.p.shape.heads), group = static_cast<int>(c.p.shape.group()),
            i_q = static_cast<int>(blockIdx.x) % heads;
  // In the order in which the reverse sweep finishes chunks.
  const std::int64_t turn = blockIdx.x / heads, sequences = c.forward.slots_per_sequence > 0 ? c.p.shape.batch : 1,
                     length = c.forward.slots / sequences;
  const int slot = static_cast<int>(turn % sequences * length + length - 1 - turn / sequences);
  auto& memory = *reinterpret_cast<ChannelShared<kTiles>*>(shared);
  {
    const ChunkAt place = chunk_at(c.forward, slot);
    if (threadIdx.x == 0) {
      memory.at = place;
      for (std::uint64_t& barrier : memory.full) barrier_init(&barrier, 1);
      fence_for_products();
    }
  }
  __syncthreads();
  const ChunkAt& at = memory.at;
#pragma unroll 1
  for (int i_h = i_q * group; i_h < (i_q + 1) * group && at.rows > 0; ++i_h) {
    if (c.counted && threadIdx.x == 0) {
      wait_for_count(&c.ready[slot * c.p.shape.value_heads + i_h], 2 * static_cast<unsigned>(c.slices));
    }
    fence_for_products();
    __syncthreads();  // and what the value head before has read and written is overwritten
    ChannelGrads<kTiles>(c, memory, at, slot, i_q, i_h, opaque(threadIdx.x)).run();
  }
  // The inputs are there, but the next kernel in the stream must find the sweeps ended.
  if (c.counted && blockIdx.x == gridDim.x - 1) wait_for_kernels();
}

template <int kTiles>
void launch(const ChunkBackward<bfloat16>& c, cudaStream_t stream) {
  using Shared = ChannelShared<kTiles>;
  constexpr int kBytes = sizeof(Shared);
  const auto kernel = channel_grads_kernel<kTiles>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  const unsigned grid = grid_of("chunk_bwd", c.forward.slots * c.p.shape.heads);
  if (c.counted) {
    return launch_early("chunk_bwd, grads by channel", kernel, grid, Shared::kThreads, kBytes, stream, c);
  }
  kernel<<<grid, Shared::kThreads, kBytes, stream>>>(c);
  check_launch("chunk_bwd, grads by channel");
}

}  // namespace

void launch_grads_channel(const ChunkBackward<bfloat16>& c, cudaStream_t stream) {
  c.p.shape.key_dim <= 64 ? launch<1>(c, stream) : launch<2>(c, stream);
}

}  // namespace efla::gpu
