// What a token of a decode step gives to the columns of a state. One warp prepares a token.
#pragma once

#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/recurrent/token.cuh"

namespace efla::gpu {

// What a token gives to the columns of a thread block, in shared memory. k and q are after the L2 norm, decayed_k and
// decayed_q are times `decay`, and a is the erase gain.
template <int KD, int kColumns>
struct StepToken {
  float decay[KD], k[KD], decayed_k[KD], decayed_q[KD];
  float v[kColumns];  // b v, with the write gain b
  float a, q_dot_k, unused[2];
};

// A token's inputs in the registers of a warp: element lane + 32 i of g and v.
template <int KD, int kColumns>
struct StepTokenInputs {
  static constexpr int kValues = kColumns / 32;
  TokenRows<KD> rows;
  float beta, g[KD / 32], v[kValues];
};

// Reads the inputs of token t. All reads come before any use, so that one wait for memory suffices. `first` is the
// first value column.
template <int KD, int kColumns, class T, class S>
__device__ __forceinline__ StepTokenInputs<KD, kColumns> read_token(const DeltaSteps<T, S>& p, int i_b, int t, int i_h,
                                                                    int i_q, int first, int lane) {
  StepTokenInputs<KD, kColumns> in;
  in.rows = read_rows<KD>(p.q, p.k, i_b, t, i_q, lane);
  in.beta = to_float(p.beta(i_b, t, i_h));
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    const int channel = p.rule.decay == Decay::channel ? lane + 32 * i : 0;
    in.g[i] = p.g && channel < p.shape.key_dim ? p.g(i_b, t, i_h, channel) : 0.0F;
  }
#pragma unroll
  for (int i = 0; i < in.kValues; ++i) {
    const int column = first + lane + 32 * i;
    in.v[i] = column < p.shape.value_dim ? to_float(p.v(i_b, t, i_h, column)) : 0.0F;
  }
  return in;
}

// Computes a StepToken from a token's inputs. Run by one warp.
template <int KD, int kColumns>
__device__ __forceinline__ void finish_token(const DeltaRule& rule, StepTokenInputs<KD, kColumns>& in, int lane,
                                             StepToken<KD, kColumns>& token) {
  normalise_rows(in.rows, rule.qk_l2norm);
  const float alpha = gain_alpha(rule.step, in.beta, in.rows.lambda);
  const float b = static_cast<float>(rule.step.write_scale) * alpha, q_dot_k = dot_rows(in.rows.q, in.rows.k);
#pragma unroll
  for (int i = 0; i < KD / 32; ++i) {
    const int key = lane + 32 * i;
    const float decay = expf(in.g[i]);
    token.decay[key] = decay;
    token.k[key] = in.rows.k[i];
    token.decayed_k[key] = decay * in.rows.k[i];
    token.decayed_q[key] = decay * in.rows.q[i];
  }
#pragma unroll
  for (int i = 0; i < in.kValues; ++i) token.v[lane + 32 * i] = b * in.v[i];
  if (lane == 0) {
    token.a = static_cast<float>(rule.step.erase_scale) * alpha;
    token.q_dot_k = q_dot_k;
  }
}

}  // namespace efla::gpu
