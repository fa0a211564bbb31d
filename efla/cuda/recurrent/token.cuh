// What the kernels of the token recurrence have in common: the inputs of tokens as a warp reads them (lane l has
// elements l, l + 32 and so on of a row), and the state in registers.
#pragma once

#include <cstdint>
#include <string>

#include "efla/base/dtype.h"
#include "efla/base/error.h"
#include "efla/base/view.h"
#include "efla/cuda/delta.h"
#include "efla/rule/problem.h"

namespace efla::gpu {

// Throws Error(operation, …) if the key dim exceeds kMaxKeyDim.
inline void require_key_dim(const char* operation, std::int64_t key_dim) {
  if (key_dim > kMaxKeyDim) {
    throw Error(operation, "key dim K", std::to_string(key_dim), "at most " + std::to_string(kMaxKeyDim) + " on a GPU");
  }
}

// Returns the sum over the lanes of a warp.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

// Returns the sums of both members over the lanes of a warp. Their shuffles overlap.
__device__ __forceinline__ float2 warp_sum(float2 x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x.x += __shfl_xor_sync(0xffffffffU, x.x, offset);
    x.y += __shfl_xor_sync(0xffffffffU, x.y, offset);
  }
  return x;
}

// Reads a row [K] of a token, with zeros beyond K. The elements stay in the type of memory, so that the thread does not
// wait for them here.
template <int KD, class T>
__device__ __forceinline__ void read_row(const View<const T, 4>& view, std::int64_t i_b, std::int64_t t,
                                         std::int64_t i_h, int lane, T (&row)[KD / 32]) {
  const T* from = view.at(i_b, t, i_h, lane);
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) row[i] = lane + 32 * i < view.extent[3] ? from[32 * i * view.stride[3]] : T{};
}

// Returns a lane's part of the product of two rows.
template <int kCount>
__device__ __forceinline__ float dot_lane(const float (&x)[kCount], const float (&y)[kCount]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += x[i] * y[i];
  return sum;
}

// Returns the product of two rows, summed over all lanes.
template <int kCount>
__device__ __forceinline__ float dot_rows(const float (&x)[kCount], const float (&y)[kCount]) {
  return warp_sum(dot_lane(x, y));
}

// Returns acc + s x.
__device__ __forceinline__ float4 accumulated(const float4& acc, const float4& s, float x) {
  return {fmaf(s.x, x, acc.x), fmaf(s.y, x, acc.y), fmaf(s.z, x, acc.z), fmaf(s.w, x, acc.w)};
}

// A token's query and key as they are in memory, and with kTwoKeys its erase key.
template <int KD, bool kTwoKeys, class T>
struct RawRows {
  T q[KD / 32], k[KD / 32], erase_key[kTwoKeys ? KD / 32 : 0];
};

// Reads the rows of q, k and the erase key. All reads come before any use, so that one wait for memory suffices.
template <int KD, bool kTwoKeys, class T, class Problem>
__device__ __forceinline__ RawRows<KD, kTwoKeys, T> read_rows(const Problem& p, std::int64_t i_b, std::int64_t t,
                                                              std::int64_t i_q, int lane) {
  RawRows<KD, kTwoKeys, T> rows;
  read_row<KD>(p.q, i_b, t, i_q, lane, rows.q);
  read_row<KD>(p.k, i_b, t, i_q, lane, rows.k);
  if constexpr (kTwoKeys) read_row<KD>(p.erase_key, i_b, t, i_q, lane, rows.erase_key);
  return rows;
}

// A token's query and keys, after the L2 norm if the rule has one, and the factors of the norm.
template <int KD, bool kTwoKeys>
struct TokenRows {
  float q[KD / 32], k[KD / 32], erase_key[kTwoKeys ? KD / 32 : 0];
  float q_factor = 1, k_factor = 1;
  float lambda, q_dot_k;  // Σk², or with two keys μ = κ·k, and q·k

  // Returns the key that erases.
  __device__ __forceinline__ const float (&erasing() const)[KD / 32] {
    if constexpr (kTwoKeys) {
      return erase_key;
    } else {
      return k;
    }
  }
};

// Returns the rows after the L2 norm, if the rule has one, with λ or μ and q·k.
template <int KD, bool kTwoKeys, class T>
__device__ __forceinline__ TokenRows<KD, kTwoKeys> normalised_rows(const RawRows<KD, kTwoKeys, T>& raw, bool l2norm) {
  TokenRows<KD, kTwoKeys> rows;
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    rows.q[i] = to_float(raw.q[i]);
    rows.k[i] = to_float(raw.k[i]);
    if constexpr (kTwoKeys) rows.erase_key[i] = to_float(raw.erase_key[i]);
  }
  if (l2norm) {
    constexpr auto kEpsilon = static_cast<float>(kL2NormEpsilon);
    const float2 squares = warp_sum(float2{dot_lane(rows.q, rows.q), dot_lane(rows.k, rows.k)});
    rows.q_factor = 1 / sqrtf(squares.x + kEpsilon);
    rows.k_factor = 1 / sqrtf(squares.y + kEpsilon);
#pragma unroll
    for (int i = 0; i < KD / 32; ++i) {
      rows.q[i] *= rows.q_factor;
      rows.k[i] *= rows.k_factor;
      if constexpr (kTwoKeys) rows.erase_key[i] *= rows.k_factor;
    }
  }
  const float2 products = warp_sum(float2{dot_lane(rows.erasing(), rows.k), dot_lane(rows.q, rows.k)});
  rows.lambda = products.x;
  rows.q_dot_k = products.y;
  return rows;
}

// Returns α of a token, from TokenRows::lambda.
template <bool kTwoKeys>
__device__ __forceinline__ float alpha_of(const StepSize& step, float beta, float lambda) {
  return kTwoKeys ? two_key_alpha(step, beta, lambda) : gain_alpha(step, beta, lambda);
}

// What kTokens tokens give to kSlice value columns, in shared memory: float32, after the L2 norm. Keys beyond K and
// columns beyond V are zeros. a and b are the gains.
template <int KD, bool kChannel, bool kTwoKeys, int kSlice, int kTokens>
struct TokenStage {
  float q[kTokens][KD], k[kTokens][KD];
  float decay[kTokens][kChannel ? KD : 1];
  float v[kTokens][kSlice];
  float a[kTokens], b[kTokens];
  float erase_key[kTwoKeys ? kTokens : 0][KD];

  // Returns the key with which token r erases.
  __device__ __forceinline__ const float (&erasing(int r) const)[KD] {
    if constexpr (kTwoKeys) {
      return erase_key[r];
    } else {
      return k[r];
    }
  }
};

// Writes token t of a forward or a backward problem to row r of the stage. `first` is the first value column. Run by
// one warp.
template <class T, int KD, bool kChannel, bool kTwoKeys, int kSlice, int kTokens, class Problem>
__device__ void stage_token(const Problem& p, std::int64_t i_b, std::int64_t t, std::int64_t i_h, std::int64_t first,
                            int r, int lane, TokenStage<KD, kChannel, kTwoKeys, kSlice, kTokens>& stage) {
  const TokenRows<KD, kTwoKeys> rows =
      normalised_rows(read_rows<KD, kTwoKeys, T>(p, i_b, t, i_h / p.shape.group(), lane), p.rule.qk_l2norm);
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    const int key = lane + 32 * i;
    stage.q[r][key] = rows.q[i];
    stage.k[r][key] = rows.k[i];
    if constexpr (kTwoKeys) stage.erase_key[r][key] = rows.erase_key[i];
    if constexpr (kChannel) stage.decay[r][key] = key < p.shape.key_dim ? expf(p.g(i_b, t, i_h, key)) : 1.0F;
  }
  for (int j = lane; j < kSlice; j += 32) {
    stage.v[r][j] = first + j < p.shape.value_dim ? to_float(p.v(i_b, t, i_h, first + j)) : 0.0F;
  }
  if (lane == 0) {
    const float alpha = alpha_of<kTwoKeys>(p.rule.step, to_float(p.beta(i_b, t, i_h)), rows.lambda);
    stage.a[r] = static_cast<float>(p.rule.step.erase_scale) * alpha;
    stage.b[r] = static_cast<float>(p.rule.step.write_scale) * alpha;
    if constexpr (!kChannel) stage.decay[r][0] = p.g ? expf(p.g(i_b, t, i_h, 0)) : 1.0F;
  }
}

inline constexpr int kParts = 8;    // threads that share a column of a state
inline constexpr int kColumns = 2;  // columns per thread

// The columns of a state that a thread has: s[j][4·i + c] is key 4·kParts·i + 4·part + c of column `column` + j.
template <int KD>
struct Columns {
  static constexpr int kKeys = KD / kParts;
  float s[kColumns][kKeys];
  int part;
  std::int64_t column;

  // Returns the key of s[j][i].
  __device__ int key(int i) const { return i / 4 * 4 * kParts + 4 * part + i % 4; }

  // Calls f(element, key, column) for the elements that the state has.
  template <class F>
  __device__ void for_each(std::int64_t key_dim, std::int64_t value_dim, F&& f) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        if (key(i) < key_dim && column + j < value_dim) f(s[j][i], key(i), column + j);
      }
    }
  }
};

}  // namespace efla::gpu
