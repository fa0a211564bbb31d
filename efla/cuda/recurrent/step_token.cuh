// What a token of a decode step gives to the columns of a state. One warp prepares a token.
#pragma once

#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/recurrent/token.cuh"

namespace efla::gpu {

// The rows of a state are divided among kRowGroups groups of neighbouring lanes: group g has four rows of every 32, 4 g
// below the first.
inline constexpr int kRowGroups = 8;
// Returns row i of a lane in group 0.
__device__ constexpr int row_of(int i) { return i / 4 * 4 * kRowGroups + i % 4; }

// What a token gives to the columns of a thread block, in shared memory. k and q are after the L2 norm, decayed_k and
// decayed_q are times `decay`, and a is the erase gain. With two keys decayed_k is the erase key.
template <int KD, int kColumns>
struct StepToken {
  float decay[KD], k[KD], decayed_k[KD], decayed_q[KD];
  float v[kColumns];  // b v, with the write gain b
  float a, q_dot_k, unused[2];
};

// A token's inputs in the registers of a warp, as they are in memory: element lane + 32 i of g and v.
template <int KD, int kColumns, bool kTwoKeys, class T>
struct StepTokenInputs {
  static constexpr int kValues = kColumns / 32;
  RawRows<KD, kTwoKeys, T> rows;
  T beta, v[kValues];
  float g[KD / 32];
};

// Reads the inputs of token t. No read is used here, so that the caller can begin to read a state before it waits.
// `first` is the first value column.
template <int KD, int kColumns, bool kTwoKeys, class T, class S>
__device__ __forceinline__ StepTokenInputs<KD, kColumns, kTwoKeys, T> read_token(const DeltaSteps<T, S>& p, int i_b,
                                                                                 int t, int i_h, int i_q, int first,
                                                                                 int lane) {
  StepTokenInputs<KD, kColumns, kTwoKeys, T> in;
  in.rows = read_rows<KD, kTwoKeys, T>(p, i_b, t, i_q, lane);
  in.beta = p.beta(i_b, t, i_h);
  // A gate per head is read KD / 32 times, as if every key channel had it.
  const bool channels = p.rule.decay == Decay::channel;
  const std::int64_t step = channels ? 32 * p.g.stride[3] : 0, gates = channels ? p.shape.key_dim : KD;
  const float* g = p.g ? p.g.at(i_b, t, i_h, channels ? lane : 0) : nullptr;
#pragma unroll
  for (int i = 0; i < KD / 32; ++i, g += step) in.g[i] = p.g && lane + 32 * i < gates ? *g : 0.0F;
  const T* const v = p.v.at(i_b, t, i_h, first + lane);
#pragma unroll
  for (int i = 0; i < in.kValues; ++i) {
    in.v[i] = first + lane + 32 * i < p.shape.value_dim ? v[32 * i * p.v.stride[3]] : T{};
  }
  return in;
}

// Computes a StepToken from a token's inputs. Run by one warp.
template <int KD, int kColumns, bool kTwoKeys, class T>
__device__ __forceinline__ void finish_token(const DeltaRule& rule,
                                             const StepTokenInputs<KD, kColumns, kTwoKeys, T>& in, int lane,
                                             StepToken<KD, kColumns>& token) {
  const TokenRows<KD, kTwoKeys> rows = normalised_rows(in.rows, rule.qk_l2norm);
  const float alpha = alpha_of<kTwoKeys>(rule.step, to_float(in.beta), rows.lambda);
  const float b = static_cast<float>(rule.step.write_scale) * alpha;
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    const int key = lane + 32 * i;
    const float decay = expf(in.g[i]);
    token.decay[key] = decay;
    token.k[key] = rows.k[i];
    token.decayed_k[key] = decay * rows.erasing()[i];
    token.decayed_q[key] = decay * rows.q[i];
  }
#pragma unroll
  for (int i = 0; i < in.kValues; ++i) token.v[lane + 32 * i] = b * to_float(in.v[i]);
  if (lane == 0) {
    token.a = static_cast<float>(rule.step.erase_scale) * alpha;
    token.q_dot_k = rows.q_dot_k;
  }
}

}  // namespace efla::gpu
