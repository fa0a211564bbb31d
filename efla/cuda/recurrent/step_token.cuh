// What the tokens of decode steps bring to the states, prepared by one warp per token.
#pragma once

#include "efla/cuda/common/ptx.cuh"
#include "efla/cuda/recurrent/token.cuh"

namespace efla::gpu {

// What a token brings to the columns of a thread block.
template <int KD, int kColumns>
struct StepToken {
  float decay[KD], k[KD], decayed_k[KD], decayed_q[KD];
  float v[kColumns];  // b v
  float a, q_dot_k, unused[2];
};

// A token's inputs as a warp reads them.
template <int KD, int kColumns>
struct StepTokenInputs {
  static constexpr int kValues = kColumns / 32;
  TokenRows<KD> rows;
  float beta, g[KD / 32], v[kValues];
};

// Reads the inputs of token t, all of them before any is used, so that one wait for memory is enough.
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

// Computes what a token brings from its inputs; run by one warp.
template <int KD, int kColumns>
__device__ __forceinline__ void finish_token(const DeltaRule& rule, StepTokenInputs<KD, kColumns>& in, int lane,
                                             StepToken<KD, kColumns>& token) {
  finish_rows(in.rows, rule.qk_l2norm);
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
