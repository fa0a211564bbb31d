// The gradients of the inputs where every key channel has a gate or where the rule has two keys. One thread block per
// chunk and query head loops over the value heads of the query head.
//
// Notation of Float32Backward. Per token k̂ = n_k k and q̂ = n_q q, per channel Γ_ij is the decay from token j to token
// i, W_ij = scale dO_i·U_j for i ≥ j, and H_ij = D_i·U_j for i > j:
//
//   dq̂_i = scale γ_i∘(dO_i Sᵀ) + Σ_{j≤i} W_ij Γ_ij∘k̂_j,    X_i = γ_i∘(D_i Sᵀ) + Σ_{j<i} H_ij Γ_ij∘k̂_j
//   dk̂_j = γ_C/γ_j∘(U_j dS'ᵀ) + Σ_{i≥j} W_ij Γ_ij∘q̂_i − Σ_{i>j} H_ij a_i Γ_ij∘k̂_i − a_j X_j
//
// dv, db and da as in grads.cu. With two keys κ̂ takes the place of k̂ in the sum with a_i and in da, and −a_j X_j is a
// part of dκ̂ instead of dk̂. Tokens are in blocks of 8. What S and earlier blocks give to block I is a recurrence
// over blocks J < I: the sum so far, decayed to the start of J, times the decay over J, plus (W or H)_IJ times the keys
// of J, decayed to the end of J. A second recurrence, from the end of the chunk, adds what dS' and later blocks give.
// No factor exceeds 1. One thread per block and channel adds both recurrences and the pairs of the block's own tokens
// in float32, 64 channels at once.
//
// The terms of a gate's gradient that span token t are of four kinds: pairs of tokens within the block of t; what
// tokens of the block from t on read from before the block; what tokens of the block before t give to after the block;
// and terms that span the whole block (crossing).
#include "efla/cuda/common/grad_tail.cuh"
#include "efla/cuda/common/lane_sums.cuh"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/float32/channels.cuh"
#include "efla/cuda/float32/grads.cuh"

namespace efla::gpu {
namespace {

constexpr int kChannels = 64;  // channels that are computed at once
constexpr int kPairs = kFloat32Blocks * (kFloat32Blocks - 1) / 2;

// Returns the index of a pair of a block and an earlier block.
__device__ __forceinline__ int pair_index(int block, int earlier) { return block * (block - 1) / 2 + earlier; }

// Sums over the channels of a token: k̂·X or κ̂·X, the products of k̂ and q̂ with their gradients, which the L2 norm needs,
// and with two keys the gradient of a gate per head.
enum ChannelSum { kErase, kAlongKey, kAlongQuery, kGate };

template <int KD, bool kTwoKeys>
struct ChannelMemory {
  static constexpr int kParts = 4, kWarps = 2 * kParts, kThreads = 32 * kWarps;
  static constexpr int kTile = kFloat32Tokens * KD, kSums = kTwoKeys ? kGate + 1 : kGate;
  // A slice of value columns. Later `state` has the products with S, and dout, d and u have rows of kChannels channels
  // of all tokens: q̂ and a∘k̂ (or a∘κ̂) decayed from the start of their block, and k̂ decayed to its end.
  alignas(128) float state[kFloat32Columns * KD];
  float dout[kFloat32Tokens * kFloat32Columns], d[kFloat32Tokens * kFloat32Columns],
      u[kFloat32Tokens * kFloat32Columns];
  float of_key[kTile];  // the product with dS'; at last dk̂
  float w[kFloat32Tokens * kFloat32Tokens], h[kFloat32Tokens * kFloat32Tokens];
  Float32Vectors vectors;
  float over[kFloat32Blocks][kChannels];  // the decay over a block
  // Terms of gates' gradients that span whole blocks: what a block's tokens read from before an earlier block, what a
  // block's tokens write that dS' has, and S·dS'.
  float read[kPairs][kChannels], written[kFloat32Blocks][kChannels], states[KD];
  KeySums<kSums, KD / 32, kFloat32Tokens> sums;
  float db[kFloat32Tokens];
  ChunkAt at;                          // not in registers, because registers are scarce
  float through_gain[kFloat32Tokens];  // twice the gradient of λ, or the gradient of μ, without `unit`
  float unit[kFloat32Tokens], along_key[kFloat32Tokens], along_query[kFloat32Tokens];

  __device__ float* of_query() { return state; }          // at last dq̂
  __device__ float* of_erase() { return state + kTile; }  // at last dκ̂, with two keys
  __device__ float* queries() { return dout; }
  __device__ float* erase() { return d; }
  __device__ float* keys() { return u; }
};
static_assert(2 * kFloat32Tokens == kFloat32Columns && kChannels == kFloat32Columns);

template <int KD, bool kTwoKeys>
class ChannelGrads : SliceGrads<KD, ChannelMemory<KD, kTwoKeys>> {
  using Base = SliceGrads<KD, ChannelMemory<KD, kTwoKeys>>;
  using Base::at_, Base::c_, Base::first_, Base::for_scores, Base::i_h_, Base::i_q_, Base::kThreads, Base::kTiles,
      Base::lane_, Base::m_, Base::multiply_slices, Base::p_, Base::part_, Base::of_queries_, Base::slot_,
      Base::thread_, Base::wait_for_loads;
  using typename Base::Rows;
  static constexpr int kBlock = kFloat32Block, kBlocks = kFloat32Blocks;
  using Tokens = float[kBlock];

 public:
  // `thread` is opaque, so that the compiler keeps nothing in registers from one value head to the next.
  __device__ ChannelGrads(const Float32Backward& c, ChannelMemory<KD, kTwoKeys>& memory, int slot, int i_q, int i_h,
                          unsigned thread)
      : Base(c, memory, memory.at, slot, i_q, thread) {
    i_h_ = i_h;
  }

  // Computes a value head. Ends with a barrier.
  __device__ void run() {
    load_image<kThreads>(&m_.vectors, &c_.forward.vectors[slot_ * p_.shape.value_heads + i_h_], sizeof(Float32Vectors),
                         thread_);
    multiply_states();
#pragma unroll 1
    for (int first = 0; first < KD; first += kChannels) add_channels(first);
    finish_tokens();
#pragma unroll 1
    for (int first = 0; first < KD; first += kChannels) store(first);
    __syncthreads();
  }

 private:
  // Return the thread's block of tokens and its channel among the kChannels. A warp has 32 channels of a block.
  __device__ static int block() { return opaque(threadIdx.x) / 32U % kBlocks; }
  __device__ static int channel() {
    const unsigned thread = opaque(threadIdx.x);
    return thread / 32 / kBlocks * 32 + thread % 32;
  }
  // Return the index of a block's token i in a tile of KD channels, and in a tile of kChannels.
  __device__ int place(int i, int channel) const { return tile_index<KD>(kBlock * block() + i, channel); }
  __device__ static int row_place(int block, int i, int channel) {
    return tile_index<kChannels>(kBlock * block + i, channel);
  }

  // Computes the products with states, W and H, and writes dv and db. Ends with a barrier.
  __device__ void multiply_states() {
    constexpr int kRowThreads = KD / 4, kRows = kThreads / kRowThreads;
    float scores[8] = {};
    float4 states{};  // of four channels, the sum of S·dS' over every kRows-th value column
    Rows dq, x, dk;
    const int column = 4 * (thread_ % kRowThreads), row = thread_ / kRowThreads;
    float db = multiply_slices(scores, dq, x, dk, [&](const float* before) {
#pragma unroll 4
      for (int i = row; i < kFloat32Columns; i += kRows) {
        const int at = tile_index<KD>(i, column);
        const float4 s = *reinterpret_cast<const float4*>(before + at),
                     ds = *reinterpret_cast<const float4*>(m_.state + at);
        states = {states.x + s.x * ds.x, states.y + s.y * ds.y, states.z + s.z * ds.z, states.w + s.w * ds.w};
      }
    });
    db = lane_sum<kThreads / kFloat32Tokens>(db);
    if (thread_ % (kThreads / kFloat32Tokens) == 0) m_.db[thread_ / (kThreads / kFloat32Tokens)] = db;
    *reinterpret_cast<float4*>(m_.dout + row * KD + column) = states;
    for_scores([&](int i, int row, int column) {
      const bool below = column < row || (of_queries_ && column == row);
      (of_queries_ ? m_.w : m_.h)[tile_index<kFloat32Tokens>(row, column)] =
          below ? (of_queries_ ? c_.forward.scale : 1.0F) * scores[i] : 0.0F;
    });
    write_rows(m_.of_query(), dq, c_.forward.scale);
    write_rows(m_.of_erase(), x, 1);
    write_rows(m_.of_key, dk, 1);
    __syncthreads();
    if (thread_ < KD) {
      float sum = 0;
      for (int i = 0; i < kRows; ++i) sum += m_.dout[i * KD + thread_];
      m_.states[thread_] = sum;
    }
    __syncthreads();
  }

  __device__ void write_rows(float* tile, const Rows& x, float factor) const {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int row = first_ + lane_ / 4 + 8 * (i % 2), column = 8 * (kTiles * part_ + i / 2) + 2 * (lane_ % 4);
      *reinterpret_cast<float2*>(tile + tile_index<KD>(row, column)) = {factor * x[2 * i], factor * x[2 * i + 1]};
    }
  }

  // Reads a channel of the block's tokens; `missing` for elements that do not exist.
  __device__ void read(const View<const float, 4>& view, std::int64_t i_h, int channel, float missing,
                       Tokens& x) const {
    const int tokens = channel < p_.shape.key_dim ? at_.rows - kBlock * block() : 0;
    const float* from = view.at(at_.i_b, at_.start + kBlock * block(), i_h, channel);
#pragma unroll
    for (int i = 0; i < kBlock; ++i, from += view.stride[1]) x[i] = i < tokens ? *from : missing;
  }
  // Reads a channel of the block's keys or queries, times the factors of the L2 norm.
  __device__ void read_normalized(const View<const float, 4>& view, const float* factors, int channel,
                                  Tokens& x) const {
    read(view, i_q_, channel, 0, x);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] *= factors[kBlock * block() + i];
  }

  // Returns whether every channel has a gate of its own.
  __device__ bool has_channel_gates() const { return !kTwoKeys || p_.rule.decay == Decay::channel; }
  // Reads the gates of the block's tokens for a channel.
  __device__ void read_gates(int channel, Tokens& x) const {
    if (has_channel_gates()) return read(p_.g, i_h_, channel, 0, x);
#pragma unroll
    for (float& gate : x) gate = 0;
    if (p_.g) read(p_.g, i_h_, 0, 0, x);
  }

  // Computes dq̂, dk̂ and X of the channels from `first` on, and writes the gradients of their gates. Ends with a
  // barrier.
  __device__ void add_channels(int first) {
    const int channel = this->channel();
    Tokens k, q, decays, of_two_keys;
    auto& erase = kTwoKeys ? of_two_keys : k;
    read_gates(first + channel, decays);
    read_normalized(p_.k, m_.vectors.key_factor, first + channel, k);
    if constexpr (kTwoKeys) read_normalized(p_.erase_key, m_.vectors.key_factor, first + channel, erase);
    read_normalized(p_.q, m_.vectors.query_factor, first + channel, q);
    float decay = 1;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      decays[i] = expf(decays[i]);
      decay *= decays[i];
      m_.queries()[row_place(block(), i, channel)] = q[i] * decay;
      m_.erase()[row_place(block(), i, channel)] = m_.vectors.a[kBlock * block() + i] * (erase[i] * decay);
    }
    m_.over[block()][channel] = decay;
    decay = 1;
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i) {
      m_.keys()[row_place(block(), i, channel)] = k[i] * decay;
      decay *= decays[i];
    }
    __syncthreads();
    add_earlier(first);
    add_later(first);
    __syncthreads();
    add_pairs(first, k, erase, decays);
    __syncthreads();
  }

  // Reads elements (row, 8 · block) to (row, 8 · block + 7) of W or H.
  __device__ static void read_scores(const float* matrix, int row, int block, Tokens& x) {
    const float* from = matrix + tile_index<kFloat32Tokens>(row, kBlock * block);
    const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }

  // Decays what S gives to the block's tokens to the block's start, and adds what earlier blocks give.
  __device__ void add_earlier(int first) {
    const int block = this->block(), channel = this->channel();
    if (block == 0) return;
    Tokens of_query, of_erase;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      of_query[i] = m_.of_query()[place(i, first + channel)];
      of_erase[i] = m_.of_erase()[place(i, first + channel)];
    }
#pragma unroll 1
    for (int other = 0; other < block; ++other) {
      float sum = 0, decay = 1;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        sum += m_.queries()[row_place(block, i, channel)] * of_query[i] -
               m_.erase()[row_place(block, i, channel)] * of_erase[i];
      }
      for (int between = other; between < block; ++between) decay *= m_.over[between][channel];
      m_.read[pair_index(block, other)][channel] = decay * sum;
      Tokens keys;
#pragma unroll
      for (int j = 0; j < kBlock; ++j) keys[j] = m_.keys()[row_place(other, j, channel)];
      const float over = m_.over[other][channel];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        Tokens w, h;
        read_scores(m_.w, kBlock * block + i, other, w);
        read_scores(m_.h, kBlock * block + i, other, h);
        of_query[i] *= over;
        of_erase[i] *= over;
#pragma unroll
        for (int j = 0; j < kBlock; ++j) {
          of_query[i] += w[j] * keys[j];
          of_erase[i] += h[j] * keys[j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      m_.of_query()[place(i, first + channel)] = of_query[i];
      m_.of_erase()[place(i, first + channel)] = of_erase[i];
    }
  }

  // Decays what dS' gives to the block's tokens to the block's end, and adds what later blocks give.
  __device__ void add_later(int first) {
    const int block = this->block(), channel = this->channel();
    Tokens of_key;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      of_key[j] = m_.of_key[place(j, first + channel)];
      sum += m_.keys()[row_place(block, j, channel)] * of_key[j];
    }
    m_.written[block][channel] = sum;
#pragma unroll 1
    for (int other = kBlocks - 1; other > block; --other) {
      const float over = m_.over[other][channel];
#pragma unroll
      for (int j = 0; j < kBlock; ++j) of_key[j] *= over;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        Tokens w, h;
        read_scores(m_.w, kBlock * other + i, block, w);
        read_scores(m_.h, kBlock * other + i, block, h);
        const float query = m_.queries()[row_place(other, i, channel)],
                    erase = m_.erase()[row_place(other, i, channel)];
#pragma unroll
        for (int j = 0; j < kBlock; ++j) of_key[j] += w[j] * query - h[j] * erase;
      }
    }
#pragma unroll
    for (int j = 0; j < kBlock; ++j) m_.of_key[place(j, first + channel)] = of_key[j];
  }

  // Returns the sum of the terms that span the whole block: from S or an earlier block to a later block or dS'.
  __device__ float crossing(int first) const {
    const int block = this->block(), channel = this->channel();
    float written = m_.states[first + channel], sum = 0;
#pragma unroll
    for (int other = 0; other < kBlocks; ++other) {
      // From here on `written` is what dS' has of S and of the blocks before `other`, decayed to the start of `other`.
      if (other < block) written = written * m_.over[other][channel] + m_.written[other][channel];
      if (other == block) written *= m_.over[other][channel];
      if (other > block) {
        written *= m_.over[other][channel];
        sum += m_.read[pair_index(other, block)][channel];
      }
    }
    return sum + written;
  }

  // Adds the pairs of the block's own tokens, from the last token to the first. At token i, dk[j] is the gradient that
  // tokens from i on give to the key of token j, decayed to token i. The product of dk[j] and the key of token j,
  // decayed to token i too, is the part of the gate's gradient at token i that comes from token j.
  __device__ void add_pairs(int first, const Tokens& k, const Tokens& erase, const Tokens& decays) {
    const int block = this->block(), channel = this->channel();
    const int tokens = first + channel < p_.shape.key_dim ? at_.rows - kBlock * block : 0;
    float key[kBlock][kBlock], from_start[kBlock], dk[kBlock];  // key[i][j]: of token j, decayed to token i
    Tokens q;                                                   // read again, because registers are scarce in between
    read_normalized(p_.q, m_.vectors.query_factor, first + channel, q);
    float spanning = crossing(first);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      from_start[i] = i > 0 ? from_start[i - 1] * decays[i] : decays[i];
      key[i][i] = k[i];
      dk[i] = m_.of_key[place(i, first + channel)];
#pragma unroll
      for (int j = 0; j < i; ++j) key[i][j] = key[i - 1][j] * decays[i];
    }
    Tokens along, gates;
    float* to = p_.dg.at(at_.i_b, at_.start + kBlock * block + kBlock - 1, i_h_, first + channel);
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i, to -= p_.dg.stride[1]) {
      Tokens w, h;
      read_scores(m_.w, kBlock * block + i, block, w);
      read_scores(m_.h, kBlock * block + i, block, h);
      const float a = m_.vectors.a[kBlock * block + i], erasing = a * erase[i];
      float dq = from_start[i] * m_.of_query()[place(i, first + channel)],
            e = from_start[i] * m_.of_erase()[place(i, first + channel)];
      spanning += q[i] * dq - erasing * e;
      float dg = spanning;
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        const float to_key = j < i ? w[j] * q[i] - h[j] * erasing : w[j] * q[i];
        dk[j] = i < kBlock - 1 ? dk[j] * decays[i + 1] + to_key : dk[j] + to_key;
        dq += w[j] * key[i][j];
        if (j == i) break;
        e += h[j] * key[i][j];
        dg += key[i][j] * dk[j];
      }
      if (has_channel_gates() && i < tokens) *to = dg;
      if constexpr (kTwoKeys) {
        gates[i] = dg;
        m_.of_erase()[place(i, first + channel)] = -a * e;
      } else {
        dk[i] -= a * e;
      }
      m_.of_query()[place(i, first + channel)] = dq;
      m_.of_key[place(i, first + channel)] = dk[i];
      along[i] = erase[i] * e;
    }
    put_sums(kErase, first, along);
    if constexpr (kTwoKeys) put_sums(kGate, first, gates);
    __syncwarp();  // the gradients are read again, instead of being kept in registers
#pragma unroll
    for (int i = 0; i < kBlock; ++i) along[i] = k[i] * m_.of_key[place(i, first + channel)];
    put_sums(kAlongKey, first, along);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) along[i] = q[i] * m_.of_query()[place(i, first + channel)];
    put_sums(kAlongQuery, first, along);
  }

  __device__ void put_sums(ChannelSum kind, int first, Tokens& x) {
    const int lane = opaque(threadIdx.x) % 32U;
    sum_over_lanes(x, lane);
    if (lane < kBlock) m_.sums.of[kind][(first + channel()) / 32][kBlock * block() + lane] = x[0];
  }

  // Writes dbeta, and the numbers per token that the gradients of keys and queries need. Ends with a barrier.
  __device__ void finish_tokens() {
    if (thread_ < kFloat32Tokens) {
      const float lambda = m_.vectors.lambda[thread_];
      const float beta = thread_ < at_.rows ? to_float(p_.beta(at_.i_b, at_.start + thread_, i_h_)) : 0.0F;
      const float dalpha = static_cast<float>(p_.rule.step.write_scale) * m_.db[thread_] -
                           static_cast<float>(p_.rule.step.erase_scale) * m_.sums.total(kErase, thread_);
      const Gain<float> of_token =
          kTwoKeys ? two_key_gain(p_.rule.step, beta, lambda) : gain(p_.rule.step, beta, lambda);
      if (thread_ < at_.rows) {
        p_.dbeta(at_.i_b, at_.start + thread_, i_h_) = beta_gradient(of_token, dalpha);
      }
      const float twice_dlambda = twice_lambda_gradient(of_token, dalpha);
      m_.through_gain[thread_] = kTwoKeys ? 0.5F * twice_dlambda : twice_dlambda;
      m_.unit[thread_] = of_token.lambda_unit;
      m_.along_key[thread_] = m_.sums.total(kAlongKey, thread_) + twice_dlambda * (of_token.lambda_unit * lambda);
      m_.along_query[thread_] = m_.sums.total(kAlongQuery, thread_);
      if constexpr (kTwoKeys) {
        m_.along_key[thread_] -= m_.vectors.a[thread_] * m_.sums.total(kErase, thread_);  // κ̂·dκ̂
        if (p_.rule.decay == Decay::scalar && thread_ < at_.rows) {
          p_.dg(at_.i_b, at_.start + thread_, i_h_, 0) = m_.sums.total(kGate, thread_);
        }
      }
    }
    __syncthreads();
  }

  // Adds the gradient through λ to dk̂, or through μ to dk̂ and dκ̂, applies the backward of the L2 norm, and stores the
  // gradients of queries and keys. For a value head after the first of its group it adds them to the stored gradients.
  __device__ void store(int first) {
    const bool first_head = i_h_ % static_cast<int>(p_.shape.group()) == 0;
    const int channel = first + this->channel(), token = kBlock * block();
    Tokens k, q, erase;
    read_normalized(p_.k, m_.vectors.key_factor, channel, k);
    if constexpr (kTwoKeys) read_normalized(p_.erase_key, m_.vectors.key_factor, channel, erase);
    read_normalized(p_.q, m_.vectors.query_factor, channel, q);
    if (channel >= p_.shape.key_dim) return;
    float *to_key = p_.dk.at(at_.i_b, at_.start + token, i_q_, channel),
          *to_query = p_.dq.at(at_.i_b, at_.start + token, i_q_, channel),
          *to_erase = kTwoKeys ? p_.derase_key.at(at_.i_b, at_.start + token, i_q_, channel) : nullptr;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (token + i >= at_.rows) return;
      float dq = m_.of_query()[place(i, channel)],
            dk = m_.of_key[place(i, channel)] +
                 m_.through_gain[token + i] * (m_.unit[token + i] * (kTwoKeys ? erase : k)[i]);
      if constexpr (kTwoKeys) {
        const float of_erase =
                        m_.of_erase()[place(i, channel)] + m_.through_gain[token + i] * (m_.unit[token + i] * k[i]),
                    derase = m_.vectors.key_factor[token + i] * of_erase;
        *to_erase = first_head ? derase : *to_erase + derase;
        to_erase += p_.derase_key.stride[1];
      }
      if (p_.rule.qk_l2norm) {
        dq = m_.vectors.query_factor[token + i] * (dq - m_.along_query[token + i] * q[i]);
        dk = m_.vectors.key_factor[token + i] * (dk - m_.along_key[token + i] * k[i]);
      }
      *to_query = first_head ? dq : *to_query + dq;
      *to_key = first_head ? dk : *to_key + dk;
      to_query += p_.dq.stride[1];
      to_key += p_.dk.stride[1];
    }
  }
};

template <int KD, bool kTwoKeys>
__global__ void __launch_bounds__(ChannelMemory<KD, kTwoKeys>::kThreads, kTwoKeys ? 1 : 2)
    channel_grads_kernel(const __grid_constant__ Float32Backward c) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int heads = static_cast<int>(c.p.shape.heads), slot = static_cast<int>(blockIdx.x) / heads,
            i_q = static_cast<int>(blockIdx.x) % heads;
  auto& memory = *reinterpret_cast<ChannelMemory<KD, kTwoKeys>*>(shared);
  {
    const ChunkAt at = chunk_at(c.forward, slot);
    if (at.rows == 0) return;
    if (threadIdx.x == 0) memory.at = at;
  }
  __syncthreads();
  const int group = static_cast<int>(c.p.shape.group());
#pragma unroll 1
  for (int i_h = i_q * group; i_h < (i_q + 1) * group; ++i_h)
    ChannelGrads<KD, kTwoKeys>(c, memory, slot, i_q, i_h,
                               opaque(threadIdx.x) & (ChannelMemory<KD, kTwoKeys>::kThreads - 1U))
        .run();
}

template <int KD, bool kTwoKeys>
void launch(const Float32Backward& c, cudaStream_t stream) {
  using Shared = ChannelMemory<KD, kTwoKeys>;
  static_assert(sizeof(Shared) <= 99 * 1024);
  launch_kernel("chunk_float32, grads by channel", channel_grads_kernel<KD, kTwoKeys>,
                grid_of("chunk_float32", c.forward.slots * c.p.shape.heads), Shared::kThreads, sizeof(Shared), stream,
                c);
}

template <int KD>
void launch(const Float32Backward& c, cudaStream_t stream) {
  c.p.rule.two_keys ? launch<KD, true>(c, stream) : launch<KD, false>(c, stream);
}

}  // namespace

void launch_float32_grads_channel(const Float32Backward& c, cudaStream_t stream) {
  float32_keys(c.p.shape) == 64 ? launch<64>(c, stream) : launch<128>(c, stream);
}

}  // namespace efla::gpu
