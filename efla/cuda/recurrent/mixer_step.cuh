// What both kernels of mixer_step have in common (mixer_step.h).
#pragma once

#include "efla/cuda/recurrent/token.cuh"
#include "efla/rule/activation.h"
#include "efla/rule/mixer_step.h"

namespace efla::gpu {

inline constexpr int kStateThreads = 256, kStateWarps = kStateThreads / 32;
inline constexpr int kStateKeys = 128, kStateColumns = 128;  // most keys and value columns of a state
inline constexpr int kFewTaps = 4;                           // taps of most convolutions

// What a token's update needs of q and k of a head: the factors of the L2 norm, and λ = ‖k‖² and q·k after the norm.
struct Keys {
  float q_factor = 1, k_factor = 1, lambda, q_dot_k;
};

// Computes the Keys of a head. Every warp computes them for itself. `convolved` has q, then k, with kStateKeys numbers
// each.
__device__ __forceinline__ Keys keys_of(const float* convolved, bool l2norm, int lane) {
  float q[kStateKeys / 32], k[kStateKeys / 32];
#pragma unroll
  for (int i = 0; i < kStateKeys / 32; ++i) {
    q[i] = convolved[lane + 32 * i];
    k[i] = convolved[kStateKeys + lane + 32 * i];
  }
  Keys keys;
  keys.lambda = dot_rows(k, k);
  keys.q_dot_k = dot_rows(q, k);
  if (!l2norm) return keys;
  constexpr auto kEpsilon = static_cast<float>(kL2NormEpsilon);
  keys.q_factor = rsqrtf(dot_rows(q, q) + kEpsilon);
  keys.k_factor = rsqrtf(keys.lambda + kEpsilon);
  keys.lambda *= keys.k_factor * keys.k_factor;
  keys.q_dot_k *= keys.q_factor * keys.k_factor;
  return keys;
}

// Returns the column in qkv of output `at` of a thread block's convolution, or −1 if there is none. The outputs are q
// and k of query head i_q, kStateKeys each, and then `columns` value columns of value head h from first_value on.
__device__ __forceinline__ int channel_column(const MixerStep& p, int at, int i_q, int h, int first_value,
                                              int columns) {
  const int key_dim = static_cast<int>(p.shape.key_dim), value_dim = static_cast<int>(p.shape.value_dim);
  const int heads = static_cast<int>(p.shape.heads), in_values = at - 2 * kStateKeys;
  if (in_values < 0)
    return at % kStateKeys < key_dim ? (at / kStateKeys * heads + i_q) * key_dim + at % kStateKeys : -1;
  const int value = first_value + in_values;
  return in_values < columns && value < value_dim ? 2 * heads * key_dim + h * value_dim + value : -1;
}

// The gains of a head, and its factor of the outputs.
struct HeadGains {
  float a, b, scale;  // erase gain, write gain

  __device__ __forceinline__ HeadGains(const MixerStep& p, float beta, const Keys& keys, float scale) : scale(scale) {
    const float alpha = gain_alpha(p.rule.step, beta, keys.lambda);
    a = static_cast<float>(p.rule.step.erase_scale) * alpha;
    b = static_cast<float>(p.rule.step.write_scale) * alpha;
  }

  // Returns what four columns of the state get, b v − a S̃ᵀk.
  __device__ __forceinline__ float4 writes(const float4& v, const float4& error) const {
    return {fmaf(b, v.x, -a * error.x), fmaf(b, v.y, -a * error.y), fmaf(b, v.z, -a * error.z),
            fmaf(b, v.w, -a * error.w)};
  }

  // Returns the output of column c before the norm, with value v. The rows of `errors` and `outs` are the warps' parts
  // of S̃ᵀk and S̃ᵀq.
  template <int kColumns>
  __device__ __forceinline__ float output(const float (&errors)[kStateWarps][kColumns],
                                          const float (&outs)[kStateWarps][kColumns], int c, float v,
                                          const Keys& keys) const {
    float error = 0, out = 0;
#pragma unroll
    for (int w = 0; w < kStateWarps; ++w) {
      error += errors[w][c];
      out += outs[w][c];
    }
    return scale * fmaf(keys.q_dot_k, fmaf(b, v, -a * error), out);
  }
};

// Returns decay · s + k · u, four columns of a row of the state after the token.
__device__ __forceinline__ float4 updated(const float4& s, float decay, float k, const float4& u) {
  return {fmaf(k, u.x, decay * s.x), fmaf(k, u.y, decay * s.y), fmaf(k, u.z, decay * s.z), fmaf(k, u.w, decay * s.w)};
}

// Returns the factor of the output norm, with the sum of squares of the head's outputs.
__device__ __forceinline__ float norm_factor(const MixerStep& p, float squares) {
  return rsqrtf(__fdividef(squares, static_cast<float>(static_cast<int>(p.shape.value_dim))) + p.norm_eps);
}

// The numbers from which a thread computes β of a value head, the decay of its key channel, and the output norm and
// gate of its value column.
struct HeadScalars {
  float beta = 0, beta_factor = 1, decay = 0, decay_bias = 0, rate = 0, norm_weight = 1, gate = 0, gate_bias = 0;

  // Reads the parameters, which no kernel writes, for a value head, a key channel and a value column of the head.
  __device__ __forceinline__ void read_parameters(const MixerStep& p, int h, int channel, int value) {
    beta_factor = p.beta_factor(h);
    if (p.rule.decay != Decay::none) decay_bias = p.decay_bias(channel), rate = p.rate(h);
    if (p.norm_weight) norm_weight = p.norm_weight(value);
    if (p.gate_bias) gate_bias = p.gate_bias(h * static_cast<int>(p.shape.value_dim) + value);
  }
  // Returns β.
  __device__ float beta_of(const MixerStep& p) const {
    if (p.beta_activation == BetaActivation::one) return beta_factor;
    return beta_factor * (p.beta_activation == BetaActivation::sigmoid ? sigmoid(beta) : softplus(beta));
  }
  // Returns the decay e^g of the thread's key channel.
  __device__ float decay_of(const MixerStep& p) const {
    if (p.rule.decay == Decay::none) return 1;
    const float z = decay + decay_bias;
    return expf(p.decay_activation == DecayActivation::sigmoid ? p.bound * sigmoid(rate * z) : -rate * softplus(z));
  }
  // Returns the factor of an output from the norm's weight and the gate, without the root mean square.
  __device__ float output_factor(const MixerStep& p) const {
    if (!p.gate) return norm_weight;
    const float z = gate + gate_bias;
    return norm_weight * sigmoid(z) * (p.gate_activation == GateActivation::silu ? z : 1.0F);
  }
};

// Returns the index of a thread's key channel among the decays.
__device__ __forceinline__ int decay_channel(const MixerStep& p, int h, int thread) {
  const int key_dim = static_cast<int>(p.shape.key_dim);
  return p.rule.decay == Decay::channel ? h * key_dim + min(thread, key_dim - 1) : h;
}

}  // namespace efla::gpu
