// The gradients of the inputs by chunks where every key channel has a gate or the rule has two keys, on Hopper GPUs,
// for all chunks at once. One thread block of 8 warps per 64 keys computes a chunk and a query head, and loops over the
// value heads of the query head. docs/design/2026-11-cuda-backward.md and docs/equations.md (decay) explain the
// algorithm.
//
// Notation of grads_portable.cu, with decays Γ and γ per channel and with the factors of the L2 norm in W and H. E_i
// here is n_k,i X_i of grads_portable.cu.
//
//   W_ij = scale n_q,i n_k,j dO_i·U_j  for i ≥ j,    H_ij = n_k,i n_k,j D_i·U_j  for i > j
//   n_q dq̂_i = scale n_q,i γ_i∘(dO Sᵀ)_i + Σ_{j≤i} W_ij Γ_ij∘k_j
//   E_i = n_k,i γ_i∘(D Sᵀ)_i + Σ_{j<i} H_ij Γ_ij∘k_j,    da_i = −k_i·E_i
//   n_k dk̂_j = n_k,j γ_C/γ_j∘(U dS'ᵀ)_j + Σ_{i≥j} W_ij Γ_ij∘q_i − Σ_{i>j} a_i H_ij Γ_ij∘k_i − a_j E_j
//
// With two keys κ takes the place of k in da, in the sum with a_i and in n_k,i of E_i and H_ij. −a_j E_j is then a part
// of n_k dκ̂_j. A gate per head is the gate of every channel, and its gradient is the sum of theirs.
//
// The gradient of a gate is the sum of grads_portable.cu, per channel. Tokens are in four blocks of 16.
//
// What S and earlier blocks give to block I is a recurrence over blocks J < I: the sum so far, decayed to the start of
// J, times the decay over J, plus (W or H)_IJ times the keys of J, decayed to the end of J. A second recurrence, from
// the end of the chunk, adds what dS' and later blocks give. No factor exceeds 1. These are products of the tensor
// cores.
//
// Pairs of tokens within a block are added in float32, by one thread per block and channel. First come pairs with the
// key in the first half of the block and the query in the second half: keys are decayed to the border between the
// halves, queries from the border. Then come the pairs within each half.
//
// The terms of a gate's gradient that span token t are of four kinds: pairs of tokens within the block of t; what
// tokens of the block from t on read from before the block; what tokens of the block before t give to after the block;
// and terms that span the whole block (Crossing).
#include "efla/cuda/chunk/grads/grads_channel_sm90.cuh"
#include "efla/cuda/common/error.h"
#include "efla/cuda/common/launch.h"

namespace efla::gpu {

template <class E, int kTiles, bool kTwoKeys>
__device__ void ChannelGrads<E, kTiles, kTwoKeys>::decay_rows() {
  float decays[kBlock], k[kBlock], x[kBlock], decay = 1;
  read_gates(decays);
  copy_async_wait<kStages>();
  __syncthreads();
  put_squares();
  if constexpr (kTwoKeys) put_erase_products();
  if constexpr (kUnitRows<E>) {
    __syncthreads();
    make_units();
  }
  const int element = this->element();
  read(tile().k, k, element);
  if (block_ > 0) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = read(tile().q, i, element) * (decay *= decays[i]);
    write_rows(tile().queries, kBlock * (block_ - 1), x, element);
  }
  if (block_ < kBlocks - 1) {
    decay = 1;
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i, decay *= decays[i + 1]) x[i] = k[i] * decay;
    write_rows(tile().keys, kBlock * block_, x, element);
  }
  m_.decay[block_][channel_] = decay;
  __syncthreads();
  if (thread_ < kChunkTokens) {
    constexpr auto kEpsilon = static_cast<float>(kL2NormEpsilon);
    const float key = squares_of(kKeySquares), query = squares_of(kQuerySquares);
    const float n_k = p_.rule.qk_l2norm ? 1 / sqrtf(key + kEpsilon) : 1.0F;
    const float product = kTwoKeys ? m_.sums.total(kEraseKey, thread_) : 0.0F;
    const float alpha = is_euler() ? beta()
                        : kTwoKeys ? two_key_alpha(p_.rule.step, beta(), product * n_k * n_k)
                                   : gain_alpha(p_.rule.step, beta(), key * n_k * n_k);
    m_.key_factor[thread_] = n_k;
    m_.squares[thread_] = key;
    m_.query_factor[thread_] = p_.rule.qk_l2norm ? 1 / sqrtf(query + kEpsilon) : 1.0F;
    m_.a[thread_] = static_cast<float>(p_.rule.step.erase_scale) * alpha;
    m_.b[thread_] = static_cast<float>(p_.rule.step.write_scale) * alpha;
    if constexpr (kTwoKeys) {
      m_.erase_key[thread_] = product;
      m_.erase_factor[thread_] = n_k;
    }
    if constexpr (kUnitRows<E>) {
      const float key_unit = unit_of(key, p_.rule.qk_l2norm), query_unit = unit_of(query, p_.rule.qk_l2norm);
      m_.key_factor[thread_] *= inverse_of_power(key_unit);
      m_.query_factor[thread_] *= inverse_of_power(query_unit);
      m_.squares[thread_] *= key_unit * key_unit;
      m_.key_unit[thread_] = key_unit;
      m_.query_unit[thread_] = query_unit;
      if constexpr (kTwoKeys) {
        const float erase_unit = unit_of(m_.sums.total(kEraseSquares, thread_), p_.rule.qk_l2norm);
        m_.erase_key[thread_] *= key_unit * erase_unit;
        m_.erase_factor[thread_] *= inverse_of_power(erase_unit);
        m_.erase_unit[thread_] = erase_unit;
      }
    }
  }
  __syncthreads();
  if (block_ == 0) return;
  const E* const keys = kTwoKeys ? erase_keys() : nullptr;
  decay = 1;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x[i] = -m_.a[kBlock * block_ + i] * ((kTwoKeys ? erase_key(keys, i) : k[i]) * (decay *= decays[i]));
  }
  write_rows(tile().erase, kBlock * (block_ - 1), x, element);
}

template <class E, int kTiles, bool kTwoKeys>
__device__ void ChannelGrads<E, kTiles, kTwoKeys>::add_pairs(const Sums& of_query, const Sums& of_erase,
                                                             const Sums& of_key) {
  write_scratch(of_query, m_.queries(warp_));
  write_scratch(of_erase, m_.erase(warp_));
  write_scratch(of_key, m_.keys(warp_));
  __syncwarp();
  const float2 spanning = join_halves();
#pragma unroll 1
  for (int half = 0; half < 2; ++half) pairs(half, half == 0 ? spanning.x : spanning.y);
  __syncthreads();
  finish_tokens();
  finish(0, p_.dq, m_.queries(warp_), tile().q, m_.of_query);
  if constexpr (kTwoKeys) {
    finish_keys(m_.of_key, m_.of_other_key);
  } else {
    finish(1, p_.dk, m_.keys(warp_), tile().k, m_.of_key);
  }
}

// Let M be the border between the halves and T the decay over the first half. For a token i of the second half, let X_i
// be the part of dq̂ that is in the scratch. X_i becomes T X_i + Σ_j W_ij Γ_Mj∘k_j over the tokens j of the first half,
// which is decayed to M. E_i is computed in the same way, and so is dk̂ of the first half, from the other side of M.
template <class E, int kTiles, bool kTwoKeys>
__device__ float2 ChannelGrads<E, kTiles, kTwoKeys>::join_halves() {
  float* const queries = m_.queries(warp_);
  float* const erase = m_.erase(warp_);
  float* const keys = m_.keys(warp_);
  const float(*const decays)[64 * kTiles] = m_.decays + kBlock * block_;
  const int element = this->element();
  const E* const of_erase = kTwoKeys ? erase_keys() : nullptr;
  float k[kHalf], sums[kHalf], over_first = 1, over_second = 1, read_before = 0, written = 0;
#pragma unroll
  for (int j = kHalf - 1; j >= 0; --j) {
    k[j] = read(tile().k, j, element) * over_first;
    over_first *= decays[j][channel_];
    sums[j] = 0;
  }
#pragma unroll 1
  for (int first = kHalf; first < kBlock; first += 4) {
    const int first_element = element ^ (first % 8 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first + i, at = kBlock * 128 * block_ + first * 128 + offset_of(i, first_element),
                scratch = 32 * first + place(i, lane_);
      over_second *= decays[token][channel_];
      const float q = over_second * to_float(*reinterpret_cast<const E*>(tile().q + at)),
                  erasing =
                      over_second * m_.a[kBlock * block_ + token] *
                      (kTwoKeys ? erase_key(of_erase, token) : to_float(*reinterpret_cast<const E*>(tile().k + at)));
      float dq = queries[scratch], e = erase[scratch];
      read_before += q * dq - erasing * e;
      dq *= over_first;
      e *= over_first;
#pragma unroll
      for (int j = 0; j < kHalf; j += 2) {
        const auto x = *reinterpret_cast<const float4*>(&m_.diagonal(block_).of[token][j]);
        dq += x.x * k[j] + x.z * k[j + 1];
        e += x.y * k[j] + x.w * k[j + 1];
        sums[j] += x.x * q - x.y * erasing;
        sums[j + 1] += x.z * q - x.w * erasing;
      }
      queries[scratch] = dq;
      erase[scratch] = e;
    }
  }
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    float& dk = keys[place(j, lane_)];
    const float after = over_second * dk;
    written += k[j] * after;
    dk = after + sums[j];
  }
  const float spanning = crossing();
  return {spanning + over_first * read_before, spanning + written};
}

// Goes from the last token of the half to the first. At token i, dk[j] is the gradient that the tokens from i on give
// to key j, decayed to token i. The product of dk[j] and key j, also decayed to token i, is what token j adds to the
// gradient of the gate at token i.
template <class E, int kTiles, bool kTwoKeys>
__device__ void ChannelGrads<E, kTiles, kTwoKeys>::pairs(int half, float spanning) {
  const int first = kHalf * half, tokens = kBlock * block_ + first, element = this->element();
  float* const queries = m_.queries(warp_) + 32 * first;
  float* const erase = m_.erase(warp_) + 32 * first;
  float* const keys = m_.keys(warp_) + 32 * first;
  const E* const of_erase = kTwoKeys ? erase_keys() : nullptr;
  float decays[kHalf], key[kHalf][kHalf], from_start[kHalf], dk[kHalf];  // key[i][j]: key j, decayed to token i
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    decays[i] = m_.decays[tokens + i][channel_];
    from_start[i] = i > 0 ? from_start[i - 1] * decays[i] : decays[i];
    key[i][i] = to_float(*reinterpret_cast<const E*>(tile().k + tokens * 128 + offset_of(i, element)));
    dk[i] = keys[place(i, lane_)];
#pragma unroll
    for (int j = 0; j < i; ++j) key[i][j] = key[i - 1][j] * decays[i];
  }
  float along_erase[kHalf], along_query[kHalf], along_key[kHalf], gates[kHalf];
  float* to = at(p_.dg, i_h_) + (first + kHalf - 1) * p_.dg.stride[1];
#pragma unroll
  for (int i = kHalf - 1; i >= 0; --i, to = next(to, -p_.dg.stride[1])) {
    const float q = to_float(*reinterpret_cast<const E*>(tile().q + tokens * 128 + offset_of(i, element))),
                a = m_.a[tokens + i], erase_key = kTwoKeys ? this->erase_key(of_erase, first + i) : key[i][i],
                erasing = a * erase_key;
    float dq = from_start[i] * queries[place(i, lane_)], e = from_start[i] * erase[place(i, lane_)];
    spanning += q * dq - erasing * e;
    float dg = spanning;
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      const float2 x = m_.diagonal(block_).of[first + i][first + j];
      const float to_key = j < i ? x.x * q - x.y * erasing : x.x * q;
      dk[j] = i < kHalf - 1 ? dk[j] * decays[i + 1] + to_key : dk[j] + to_key;
      dq += x.x * key[i][j];
      if (j == i) break;
      e += x.y * key[i][j];
      dg += key[i][j] * dk[j];
    }
    if constexpr (kTwoKeys) {
      if (exists(first + i) && has_channel_gates()) *to = dg;
      gates[i] = exists(first + i) ? dg : 0.0F;
      erase[place(i, lane_)] = -a * e;
    } else {
      if (exists(first + i)) *to = dg;
      dk[i] -= a * e;
    }
    queries[place(i, lane_)] = dq;
    keys[place(i, lane_)] = dk[i];
    along_erase[i] = erase_key * e;
    if constexpr (!kTwoKeys) {
      along_key[i] = key[i][i] * dk[i];
      along_query[i] = q * dq;
    }
  }
  put_sums(kErase, half, along_erase);
  if constexpr (kTwoKeys) {
    put_sums(kGate, half, gates);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {  // the gradients are read again, because registers are scarce
      const int at = tokens * 128 + offset_of(i, element);
      along_key[i] = to_float(*reinterpret_cast<const E*>(tile().k + at)) * keys[place(i, lane_)];
      along_query[i] = to_float(*reinterpret_cast<const E*>(tile().q + at)) * queries[place(i, lane_)];
    }
  }
  put_sums(kAlongKey, half, along_key);
  put_sums(kAlongQuery, half, along_query);
}

// With g the gradient of μ times the factors of both keys, dk gets g κ and dκ gets g k. Returns the factor of k in dk.
template <class E, int kTiles, bool kTwoKeys>
__device__ float ChannelGrads<E, kTiles, kTwoKeys>::of_two_keys(const Gain<float>& gain, float dalpha, float n_k) {
  const float twice = twice_lambda_gradient(gain, dalpha) * (gain.lambda_unit * n_k) * m_.erase_factor[thread_];
  m_.of_other_key[thread_] = 0.5F * twice;
  if (p_.rule.decay == Decay::scalar && thread_ < at_.rows) {
    p_.dg(at_.i_b, at_.start + thread_, i_h_, 0) = m_.sums.total(kGate, thread_);
  }
  if (!p_.rule.qk_l2norm) return 0;
  return -n_k * n_k *
         (m_.sums.total(kAlongKey, thread_) + twice * m_.erase_key[thread_] -
          m_.a[thread_] * m_.sums.total(kErase, thread_));
}

template <class E, int kTiles, bool kTwoKeys>
__device__ void ChannelGrads<E, kTiles, kTwoKeys>::finish_tokens() {
  if (thread_ < kChunkTokens) {
    const float n_k = m_.key_factor[thread_], n_q = m_.query_factor[thread_], squares = m_.squares[thread_];
    const float mu = kTwoKeys ? m_.erase_key[thread_] * n_k * m_.erase_factor[thread_] : 0.0F;
    const Gain<float> of_token = is_euler() ? Gain<float>{beta(), 1, 1, 0, 0}
                                 : kTwoKeys ? two_key_gain(p_.rule.step, beta(), mu)
                                            : gain(p_.rule.step, beta(), squares * n_k * n_k);
    const float dalpha = static_cast<float>(p_.rule.step.write_scale) * m_.b[thread_] -
                         static_cast<float>(p_.rule.step.erase_scale) * m_.sums.total(kErase, thread_);
    if (thread_ < at_.rows) {
      p_.dbeta(at_.i_b, at_.start + thread_, i_h_) = from_state<E>(beta_gradient(of_token, dalpha));
    }
    float of_key = twice_lambda_gradient(of_token, dalpha) * (of_token.lambda_unit * n_k) * n_k, of_query = 0;
    if constexpr (kTwoKeys) of_key = of_two_keys(of_token, dalpha, n_k);
    if (p_.rule.qk_l2norm) {
      if constexpr (!kTwoKeys) of_key -= n_k * n_k * (m_.sums.total(kAlongKey, thread_) + of_key * squares);
      of_query = -n_q * n_q * m_.sums.total(kAlongQuery, thread_);
    }
    m_.of_key[thread_] = of_key;
    m_.of_query[thread_] = of_query;
  }
  __syncthreads();
}

namespace {

template <class E, int kTiles, bool kTwoKeys>
__global__ void __launch_bounds__(ChannelShared<E, kTiles, kTwoKeys>::kThreads, 1)
    channel_grads_kernel(const __grid_constant__ ChunkBackward<E> c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int heads = static_cast<int>(c.p.shape.heads), group = static_cast<int>(c.p.shape.group()),
            i_q = static_cast<int>(blockIdx.x) % heads;
  // Chunks in the order in which the reverse sweep finishes them.
  const std::int64_t turn = blockIdx.x / heads, sequences = c.forward.slots_per_sequence > 0 ? c.p.shape.batch : 1,
                     length = c.forward.slots / sequences;
  const int slot = static_cast<int>(turn % sequences * length + length - 1 - turn / sequences);
  auto& memory = *reinterpret_cast<ChannelShared<E, kTiles, kTwoKeys>*>(shared);
  {
    const ChunkAt place = chunk_at(c.forward, slot);
    if (threadIdx.x == 0) {
      memory.at = place;
      for (std::uint64_t& barrier : memory.full) barrier_init(&barrier, 1);
      fence_async_proxy();
    }
  }
  __syncthreads();
  const ChunkAt& at = memory.at;
#pragma unroll 1
  for (int i_h = i_q * group; i_h < (i_q + 1) * group && at.rows > 0; ++i_h) {
    if (c.counted && threadIdx.x == 0) {
      wait_for_count(&c.ready[slot * c.p.shape.value_heads + i_h], 2 * static_cast<unsigned>(c.slices));
    }
    fence_async_proxy();
    __syncthreads();  // before the previous value head's data is overwritten
    ChannelGrads<E, kTiles, kTwoKeys>(c, memory, at, slot, i_q, i_h, opaque(threadIdx.x)).run();
  }
  // The inputs are complete, but the next kernel in the stream must also find the sweeps ended.
  if (c.counted && blockIdx.x == gridDim.x - 1) wait_for_kernels();
}

template <int kTiles, bool kTwoKeys, class E>
void launch(const ChunkBackward<E>& c, cudaStream_t stream) {
  using Shared = ChannelShared<E, kTiles, kTwoKeys>;
  constexpr int kBytes = sizeof(Shared);
  const auto kernel = channel_grads_kernel<E, kTiles, kTwoKeys>;
  const unsigned grid = grid_of("chunk_bwd", c.forward.slots * c.p.shape.heads);
  const char* const name = "chunk_bwd, grads by channel";
  if (!c.counted) return launch_kernel(name, kernel, grid, Shared::kThreads, kBytes, stream, c);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  launch_early(name, kernel, grid, Shared::kThreads, kBytes, stream, c);
}

template <int kTiles, class E>
void launch(const ChunkBackward<E>& c, cudaStream_t stream) {
  c.p.rule.two_keys ? launch<kTiles, true>(c, stream) : launch<kTiles, false>(c, stream);
}

}  // namespace

template <class E>
void launch_grads_channel(const ChunkBackward<E>& c, cudaStream_t stream) {
  c.p.shape.key_dim <= 64 ? launch<1>(c, stream) : launch<2>(c, stream);
}

template void launch_grads_channel(const ChunkBackward<bfloat16>&, cudaStream_t);
template void launch_grads_channel(const ChunkBackward<float16>&, cudaStream_t);

}  // namespace efla::gpu
